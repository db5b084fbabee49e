// What has been called otherwise, by the format that renamed it. Stored configs and records of an
// older format are read under today's names; a config file is told them. Read by
// rl/config/formats.py, which says where the numbers stand.
{
  '2': {
    // Top-level and dotted keys of a config; the new name lies in the same section.
    keys: { baseline_arm: 'bare_arm' },
    // Plugs of data sources.
    data: {
      shapes: 'tiny_world.data.shapes',
      shape_prompts: 'tiny_world.data.shape_prompts',
      shape_questions: 'tiny_world.data.shape_questions',
      shape_tokens: 'tiny_world.data.shape_tokens',
    },
    // Where paths begin that a config names.
    folders: { 'rl/tiny_world/': 'pkg://tiny_world/' },
    // Keys of metrics.jsonl and of evaluation records.
    recorded: {
      baseline_reward: 'bare_reward',
      'eval/baseline_reward': 'eval/bare_reward',
      baseline_file: 'bare_file',
    },
  },
}
