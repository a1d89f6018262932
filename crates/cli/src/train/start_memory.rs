//! Memory at the start of a run: bounds that fail if a rank ever holds a whole model.

use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use burn::tensor::Device;
use burn_fsdp::{LaunchConfig, launch};
use burn_fsdp_models::{Architecture, GptConfig, LlamaConfig, ModelConfig};
use clap::Parser;
use parking_lot::{Mutex, MutexGuard};

use crate::HEAP;
use crate::args::{Cli, Command};
use crate::error::RankError;
use crate::train::TrainConfig;
use crate::train::eager::Eager;
use crate::train::{compiled, model};

/// Locks the allocator, which counts bytes of the whole process, so only one of these tests, or of others with large
/// models, may run at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock()
}

/// Bytes of traces and tables on all ranks together, and of other tests that run at the same time.
const BOOKS: usize = 6 << 20;

fn config(arguments: &str) -> TrainConfig {
    let words = "burn-fsdp train --synthetic --seq 16 --batch 4 --json".split(' ');
    let words = words.chain(arguments.split_whitespace());
    let Command::Train(args) = Cli::parse_from(words).command else {
        unreachable!("the words begin with train");
    };
    TrainConfig::from_args(*args).unwrap_or_else(|error| panic!("{arguments}: {error}"))
}

/// Waits until the threads of earlier ranks have freed their memory, which they do with a delay, or for ten seconds.
fn settle() {
    let (mut last, mut same) = (0, 0);
    for _ in 0..200 {
        let now = HEAP.current_usage();
        same = if now == last { same + 1 } else { 0 };
        if same == 4 {
            return;
        }
        last = now;
        sleep(Duration::from_millis(50));
    }
}

/// Returns the peak growth of the heap while all ranks start, and the growth that remains afterwards.
fn of_start<A: Architecture>(sizes: A, arguments: &str) -> (usize, usize) {
    let config = Arc::new(config(arguments));
    let ranks = LaunchConfig::new(config.ranks.number());
    let body = move |world| {
        let mesh = model::mesh(&config, &world)?;
        world.barrier("before")?;
        let before = HEAP.current_usage();
        world.barrier("counted")?;
        HEAP.reset_peak_usage();
        world.barrier("measured")?;
        let (compiled, eager) = if config.is_compiled {
            (
                Some(compiled::trainer(sizes, &config, &world, &mesh)?),
                None,
            )
        } else {
            (None, Some(Eager::new(sizes, &config, &world, &mesh)?))
        };
        world.barrier("made")?;
        let seen = (HEAP.peak_usage() - before, HEAP.current_usage() - before);
        world.barrier("measured again")?;
        drop((compiled, eager));
        Ok::<_, RankError>(seen)
    };
    // A start frees what earlier ones have left, so the second one is measured.
    let start = || {
        settle();
        launch(ranks, body.clone()).unwrap_or_else(|error| panic!("{arguments}: {error}"))
    };
    start();
    start()[0]
}

/// Asserts that all ranks together hold `copies` of the model after the start, and at most `largest` additional bytes
/// during it, apart from tolerances.
fn assert_parts<A: Architecture>(
    (sizes, copies): (A, usize),
    (params, largest): (usize, usize),
    arguments: &str,
) {
    let (peak, left) = of_start(sizes, arguments);
    let held = 4 * params * copies;
    let what = format!("{arguments}: {peak} bytes, {left} left, {held} of the model");
    // Remaining memory of an earlier run may be freed in the meantime.
    assert!((held / 2..held + 2 * BOOKS).contains(&left), "{what}");
    assert!(peak <= held + largest + 2 * BOOKS, "{what}");
}

fn llama(has_tied_head: bool) -> LlamaConfig {
    let mut sizes = LlamaConfig::preset("7b").expect("a preset");
    (sizes.layers, sizes.dim, sizes.heads, sizes.kv_heads) = (8, 384, 4, 2);
    (sizes.hidden, sizes.vocab, sizes.seq) = (1023, 1031, 64);
    sizes.variant.has_tied_head = has_tied_head;
    sizes
}

fn folder(sizes: LlamaConfig, path: &Path) {
    let model = sizes.init(&Device::flex(), 3).expect("the sizes are valid");
    model.save_hugging_face(path).expect("written");
}

#[test]
fn a_folder_is_read_in_parts() {
    let _turn = alone();
    for has_tied_head in [false, true] {
        let sizes = llama(has_tied_head);
        let params = ModelConfig::Llama(sizes).num_params();
        // The values that a rank reads, and their source bytes.
        let largest = 4 * 4 * 384 * 1031;
        let place = tempfile::tempdir().expect("a folder");
        folder(sizes, place.path());
        let path = place.path().display();
        for (arguments, copies) in [
            ("--compile --ranks 2", 1),
            ("--compile --ranks 4", 1),
            (
                "--compile --ranks 4 --strategy hybrid-shard --replicate-size 2",
                2,
            ),
            ("--compile --ranks 2 --strategy no-shard", 2),
            ("--compile --ranks 2 --lora 4", 1),
            (
                "--compile --ranks 4 --lora 4 --strategy hybrid-shard --replicate-size 2",
                2,
            ),
            ("--compile --ranks 2 --unit-size 100000", 1),
            ("--compile --ranks 2 --memory-budget 1GiB", 1),
        ] {
            let arguments = format!("{arguments} --init {path}");
            assert_parts((sizes, copies), (params, largest), &arguments);
        }
        // The eager engine replaces its shards, which are zero at first, after it has read everything.
        let arguments = format!("--ranks 2 --init {path}");
        assert_parts((sizes, 1), (params, 4 * params + largest), &arguments);
    }
}

#[test]
fn random_values_are_made_one_parameter_at_a_time() {
    let _turn = alone();
    let sizes = GptConfig {
        layers: 8,
        dim: 384,
        heads: 4,
        vocab: 1031,
        seq: 16,
    };
    let params = ModelConfig::Gpt(sizes).num_params();
    let largest = 4 * 4 * 384 * 4 * 384;
    let size = "--layers 8 --dim 384 --vocab 1031";
    for (arguments, copies) in [
        ("--compile --ranks 2", 1),
        ("--compile --ranks 4", 1),
        (
            "--compile --ranks 4 --strategy hybrid-shard --replicate-size 2",
            2,
        ),
        ("--compile --ranks 2 --strategy no-shard", 2),
        ("--compile --ranks 2 --unit-size 100000", 1),
        ("--ranks 2", 1),
        ("--ranks 2 --unit-size 100000", 1),
    ] {
        let arguments = format!("{arguments} {size}");
        assert_parts((sizes, copies), (params, largest), &arguments);
    }
}

#[test]
fn initial_weights_are_written_one_parameter_at_a_time() {
    let _turn = alone();
    let sizes = llama(false);
    let place = tempfile::tempdir().expect("a folder");
    folder(sizes, place.path());
    let (path, out) = (place.path().display(), place.path().join("out"));
    let whole = 4 * ModelConfig::Llama(sizes).num_params();
    let random = "--layers 24 --dim 384 --vocab 1031";
    for from in [format!("--init {path}"), random.to_owned()] {
        let config = config(&format!("{from} --save-init {}", out.display()));
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        model::save_initial(&config).unwrap_or_else(|error| panic!("{from}: {error}"));
        let peak = HEAP.peak_usage() - before;
        // The values that are read or drawn, transposed, and as bytes.
        let largest = 4 * 4 * 384 * 4 * 384;
        assert!(
            peak <= 2 * largest + BOOKS,
            "{from}: {peak} bytes of {whole}"
        );
        let written = std::fs::metadata(&out).expect("written").len();
        assert!(written as usize > whole / 2, "{from}: {written} bytes");
    }
}

/// A plan is proved on a narrow model, so the memory for it does not grow with the model's width.
#[test]
fn a_proof_holds_no_model() {
    let _turn = alone();
    let [narrow, wide] = [64, 768].map(|dim| {
        let sizes = GptConfig {
            layers: 2,
            dim,
            heads: 4,
            vocab: 1031,
            seq: 16,
        };
        let params = 4 * ModelConfig::Gpt(sizes).num_params();
        let flags = "--compile --certify --ranks 4 --layers 2 --vocab 1031";
        let (peak, _) = of_start(sizes, &format!("{flags} --dim {dim}"));
        (peak, params)
    });
    // The largest parameter's values that are read or drawn, and as bytes.
    let largest = 4 * 4 * 768 * 4 * 768;
    let most = narrow.0 + (wide.1 - narrow.1) + largest + BOOKS;
    assert!(wide.0 <= most, "{wide:?} of {narrow:?}");
}
