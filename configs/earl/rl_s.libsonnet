// RL on simple edits.
local edits = import 'edits.libsonnet';
{ data+: { train: edits.simple(1) } }
