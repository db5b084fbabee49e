// EARL's edits, tokenised. The coefficients balance the sets to about 50 k complex edits each and
// 100 k simple ones (of 750 k); equal ones would drown the small sets.
local edits(name, coefficient) = {
  type: 'emu3_tokens',
  path: std.extVar('APP__DATA_DIR')
        + '/earl-datasets/' + name + '/train/list/tokenized_datalist.json',
  coefficient: coefficient,
};

{
  simple(coefficient):: [edits('omniedit', coefficient)],
  complex:: [
    edits('magicbrush', 6),
    edits('aurora_ag', 6),
    edits('aurora_kubric', 0.7),
    edits('ss2', 1.55),
    edits('vismin', 3.7),
    edits('human-edit', 11),
  ],
}
