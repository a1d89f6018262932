//! The memory of consolidation: a limit that fails if a whole tensor is held.

use std::sync::Arc;

use burn_fsdp_checkpoint::{
    Alone, BoxError, Checkpoints, ConsolidationConfig, Dtype, Layout, PlainTensor, Region,
    SaveRequest, TensorEntry, TensorKind, TensorSpec, TrainingState, WritePlan,
    consolidate_to_file, consolidate_to_folder,
};
use burn_fsdp_mesh::Mesh;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const SHAPE: [usize; 2] = [3_001, 4_096];
/// Size of a tensor in bytes.
const TENSOR: usize = 4 * SHAPE[0] * SHAPE[1];
/// Bytes of the blocks in which tensors are copied, of the columns that are transposed at a time, and of the
/// bookkeeping.
const BLOCK: usize = 16 << 20;
const COLUMNS: usize = 4 << 20;
const BOOKS: usize = 4 << 20;

/// Returns the value of an element in the tensor with this number.
fn element(number: usize, index: usize) -> f32 {
    (number * 1_000 + index % 9_973) as f32
}

#[test]
fn no_tensor_is_held_whole() {
    let mesh = Mesh::line("shard", 1).expect("a mesh");
    let layout = Layout::flat(&mesh, "shard").expect("an axis");
    let spec = |number: usize| {
        let name = format!("layers.{number}.weight");
        TensorSpec::new(
            &name,
            SHAPE,
            Dtype::F32,
            TensorKind::Parameter,
            layout.clone(),
        )
    };
    let specs: Vec<_> = (0..3).map(spec).collect();
    let plan = Arc::new(WritePlan::new(&mesh, specs).expect("it fits"));
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoints = Checkpoints::new(folder.path().join("run"));
    let training = TrainingState {
        step: 1,
        ..TrainingState::default()
    };
    let request = SaveRequest::new(plan, training);
    let mut source = |tensor: &TensorSpec, region: &Region| -> Result<Vec<u8>, BoxError> {
        let number = tensor.name.split('.').nth(1).map(str::parse::<usize>);
        let number = number.expect("it has one")?;
        let values = (0..region.len()).map(|index| element(number, index));
        Ok(values.flat_map(f32::to_le_bytes).collect())
    };
    burn_fsdp_checkpoint::save(&checkpoints, &request, &mut source, &mut Alone).expect("saves");
    let step = checkpoints.newest().expect("opens");

    let config = ConsolidationConfig {
        transpose_bytes: COLUMNS,
        ..ConsolidationConfig::default()
    };
    let most = BLOCK + COLUMNS + BOOKS;
    assert!(most < TENSOR, "the bound can fail");
    for is_transposed in [false, true] {
        let write_as = |tensor: &TensorEntry| {
            let name = tensor.name.clone();
            Some(PlainTensor {
                name,
                is_transposed,
            })
        };
        for max_shard_size in [None, Some(1)] {
            let out = folder
                .path()
                .join(format!("{is_transposed}-{}", max_shard_size.is_some()));
            let config = ConsolidationConfig {
                max_shard_size,
                ..config.clone()
            };
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            let written = match max_shard_size {
                None => consolidate_to_file(&step, &out, &config, write_as),
                Some(_) => consolidate_to_folder(&step, &out, &config, write_as),
            };
            let taken = HEAP.peak_usage() - before;
            let written = written.expect("writes");
            assert!(taken <= most, "{taken} bytes, {most} at most");
            // The last tensor has its original contents.
            let file = std::fs::read(written.files.last().expect("a file")).expect("there");
            let tensor = &file[file.len() - TENSOR..];
            for index in [0, 1, SHAPE[0], SHAPE[1], TENSOR / 4 - 1] {
                let place = if is_transposed {
                    index % SHAPE[0] * SHAPE[1] + index / SHAPE[0]
                } else {
                    index
                };
                let got = tensor[4 * index..4 * index + 4].try_into();
                let got = f32::from_le_bytes(got.expect("four bytes"));
                assert_eq!(got, element(2, place), "{index}");
            }
        }
    }
}
