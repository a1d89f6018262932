//! Tests of rows that are decoded in tensors of few shapes, against each sequence alone.

use std::collections::BTreeSet;
use std::convert::Infallible;

use burn::tensor::Device;
use burn_fsdp_models::{
    Architecture, AttentionScores, DecodeInputs, DecodeRows, KeyValueCache, LanguageModel,
    RopeScaling, RowsForm, SlidingWindow, decode,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::key_values::{GPT, GPT2, LLAMA, llama_with, model, tensor, values};

const ROWS: usize = 4;
const SEQ: usize = 400;

/// The shapes of a step's inputs.
type Shapes = BTreeSet<([usize; 2], usize)>;

/// Continues random sequences, which start and end at random times, and returns all shapes.
fn assert_equal_rows<A: Architecture>(
    sizes: A,
    (blocks, heads, head_dim): (usize, usize, usize),
    window: Option<usize>,
    seed: u64,
) -> Shapes {
    let sizes = sizes.for_sequences_of(SEQ);
    let model = model(sizes);
    let mut rows = DecodeRows::new(RowsForm {
        rows: ROWS,
        blocks,
        heads: 0..heads,
        head_dim,
        window,
        device: Device::flex(),
    });
    let mut random = StdRng::seed_from_u64(seed);
    let mut sequences = vec![Vec::new(); ROWS];
    let mut caches = vec![KeyValueCache::new(); ROWS];
    let mut shapes = Shapes::new();
    for step in 0..150 {
        for row in 0..ROWS {
            if step == 0 || random.random_bool(0.06) {
                let longest = if random.random_bool(0.1) { 290 } else { 30 };
                let len = random.random_range(0..longest);
                sequences[row] = (0..len).map(|_| random.random_range(0..29)).collect();
                caches[row] = KeyValueCache::new();
                rows.clear(row);
            } else if !sequences[row].is_empty() && sequences[row].len() < SEQ {
                sequences[row].push(random.random_range(0..29));
            }
        }
        let new: Vec<Vec<i64>> = (0..ROWS)
            .map(|row| sequences[row][rows.num_tokens(row)..].to_vec())
            .collect();
        let decoded = rows.advance(new.clone(), |inputs: &DecodeInputs| {
            let room = inputs.kept[0][0].dims()[2];
            shapes.insert((inputs.tokens.dims(), room));
            Ok::<_, Infallible>(decode(&model, inputs.clone()))
        });
        let Ok(logits) = decoded;
        for row in 0..ROWS {
            if new[row].is_empty() {
                assert!(logits[row].is_empty());
                continue;
            }
            let want = model.next_logits(tensor(&new[row..=row]), &mut caches[row]);
            let want = values(want);
            assert_eq!(logits[row].len(), want.len());
            for (got, want) in logits[row].iter().zip(want) {
                let is_close = (got - want).abs() <= 2e-5 * want.abs().max(1.0);
                assert!(is_close, "step {step}, row {row}: {got}, {want}");
            }
            assert_eq!(rows.num_tokens(row), caches[row].num_tokens());
        }
    }
    shapes
}

#[test]
fn rows_are_decoded_as_each_sequence_alone() {
    let gpt = (GPT.layers, GPT.heads, GPT.dim / GPT.heads);
    let gpt2 = (GPT2.layers, GPT2.heads, GPT2.dim / GPT2.heads);
    let llama = (LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim());
    let plain = LLAMA.variant.scores;
    let windowed = llama_with(
        RopeScaling::None,
        AttentionScores {
            window: SlidingWindow::All { size: 7 },
            softcap: Some(3.0),
            ..plain
        },
    );
    // Its rotations do not change up to the maximum length.
    let dynamic = llama_with(RopeScaling::Dynamic { factor: 2.0 }, plain);
    for seed in 0..3 {
        let shapes = [
            assert_equal_rows(GPT, gpt, None, seed),
            assert_equal_rows(GPT2, gpt2, None, seed),
            assert_equal_rows(LLAMA, llama, None, seed),
            assert_equal_rows(dynamic, llama, None, seed),
            assert_equal_rows(windowed, llama, Some(7), seed),
        ];
        for shapes in shapes {
            // One or all rows, 1, 16, 64 or 256 tokens, and 64 to 1024 columns: all of them, and as many new ones.
            assert!(shapes.len() <= 2 * 4 * 5, "{shapes:?}");
            let rooms = shapes.iter().map(|(_, room)| room);
            assert!(
                rooms
                    .clone()
                    .all(|room| room.is_power_of_two() && *room <= 1024)
            );
        }
    }
}
