// What has been called otherwise, by the format that renamed it. Stored configs and records of an
// older format are read under today's names; a config file is told them. Read by
// rl/config/formats.py, which says where the numbers stand.
local nothing = {
  // Top-level and dotted keys of a config; the new name lies in the same section.
  keys: {},
  // What a key of a config may say. A word may have another meaning since: it is read as the old one
  // only where a config says that it speaks the older format.
  values: {},
  // Plugs of data sources.
  data: {},
  // Where paths begin that a config names.
  folders: {},
  // Keys of metrics.jsonl and of evaluation records.
  recorded: {},
};

{
  '2': nothing + {
    keys: { baseline_arm: 'bare_arm' },
    data: {
      shapes: 'tiny_world.data.shapes',
      shape_prompts: 'tiny_world.data.shape_prompts',
      shape_questions: 'tiny_world.data.shape_questions',
      shape_tokens: 'tiny_world.data.shape_tokens',
    },
    folders: { 'rl/tiny_world/': 'pkg://tiny_world/' },
    recorded: {
      baseline_reward: 'bare_reward',
      'eval/baseline_reward': 'eval/bare_reward',
      baseline_file: 'bare_file',
    },
  },
  // What was called GRPO was a mean over tokens, which is DAPO's; GRPO's is over completions.
  '3': nothing + { values: { 'algorithm.loss': { grpo: 'dapo' } } },
}
