// RL on simple and complex edits.
local edits = import 'edits.libsonnet';
{ data+: { train: edits.simple(0.13) + edits.complex } }
