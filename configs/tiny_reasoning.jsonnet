// Reasoning at tiny size: a tiny Qwen2.5-VL answers questions about small pictures (how many, what
// colour, what sum); right answers in the required form are rewarded. Minutes on two CPU cores.
//
//   rl train configs/tiny_reasoning.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_reasoning',
  num_iterations: 100,

  policy+: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/reasoner',
    lora: $.small_lora,
    system_prompt: 'Write your thoughts in <think></think>, then the answer in <answer></answer>.',
    max_prompt_tokens: 128,
    // Records and the page show thought and answer separately; a completion without the tag is graded
    // unchanged.
    thought: { instruction: '', marker: '</think>', without_marker: 'words' },
  },
  renderer: { type: 'none' },
  rewards: { accuracy: { type: 'accuracy' }, format: { type: 'format' } },
  data+: {
    train: [{ type: 'tiny_world.data.shape_questions', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shape_questions', num_samples: 128, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 48 },
  algorithm+: { kl_coeff: 0.1, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 2e-3 },
  evaluation+: { every_n_iterations: 20, num_samples: 128, reference_drift: false },
  checkpoint+: { save_every_n_iterations: 25 },
}
