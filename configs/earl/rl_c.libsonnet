// RL on complex edits: counting, spatial relations, human edits, motion.
local edits = import 'edits.libsonnet';
{ data+: { train: edits.complex } }
