//! A small model on any mesh with known bytes, and ranks that save it.

#![allow(dead_code, reason = "every test file uses some of it")]
#![allow(unreachable_pub, reason = "a module of several test programs")]

pub mod faulty;
pub mod stored;

use std::sync::Arc;
use std::time::Duration;

use burn_fsdp_checkpoint::{
    BoxError, Checkpoints, Dtype, Error, Layout, Mesh, Region, SaveRequest, Saved, Step,
    TensorKind, TensorSpec, ThreadRendezvous, TrainingState, WritePlan, save,
};

/// Returns the bytes of the whole tensor, which differ from every other tensor's.
pub fn truth(name: &str, len: usize) -> Vec<u8> {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

pub fn num_bytes(tensor: &TensorSpec) -> usize {
    tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8
}

/// Returns the elements of a region by definition, cut out of the whole tensor's bytes.
pub fn cut_out(whole: &[u8], shape: &[usize], item_bytes: usize, region: &Region) -> Vec<u8> {
    match region {
        Region::Flat(range) => whole[range.start * item_bytes..range.end * item_bytes].to_vec(),
        Region::Box { offsets, sizes } => {
            let is_inside = |element: usize| {
                let mut rest = element;
                (0..shape.len()).rev().all(|dim| {
                    let index = rest % shape[dim];
                    rest /= shape[dim];
                    (offsets[dim]..offsets[dim] + sizes[dim]).contains(&index)
                })
            };
            whole
                .chunks(item_bytes)
                .enumerate()
                .filter(|(element, _)| is_inside(*element))
                .flat_map(|(_, bytes)| bytes.to_vec())
                .collect()
        }
    }
}

pub fn part_of(tensor: &TensorSpec, region: &Region) -> Vec<u8> {
    let whole = truth(&tensor.name, num_bytes(tensor));
    cut_out(&whole, &tensor.shape, tensor.dtype.bitsize() / 8, region)
}

pub fn source(tensor: &TensorSpec, region: &Region) -> Result<Vec<u8>, BoxError> {
    Ok(part_of(tensor, region))
}

/// The layouts of the tensors of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Flat,
    Rows,
    /// Shards of the last dim.
    Columns,
    Replicated,
}

pub const KINDS: [Kind; 4] = [Kind::Flat, Kind::Rows, Kind::Columns, Kind::Replicated];

pub fn layout(kind: Kind, mesh: &Mesh, shape: &[usize]) -> Layout {
    let layout = match kind {
        Kind::Flat => Layout::flat(mesh, "shard"),
        Kind::Rows => Layout::dim(mesh, "shard", 0),
        Kind::Columns => Layout::dim(mesh, "shard", shape.len().saturating_sub(1)),
        Kind::Replicated => Ok(Layout::replicated(mesh)),
    };
    layout.expect("the mesh has the axis")
}

/// Returns tensors with uneven and empty shapes and scalars, of many dtypes, and moments of the parameters.
pub fn tensors(mesh: &Mesh, kind: Kind) -> Vec<TensorSpec> {
    let shapes: [(&str, &[usize], Dtype, TensorKind); 11] = [
        (
            "embedding.weight",
            &[7, 15],
            Dtype::F32,
            TensorKind::Parameter,
        ),
        (
            "blocks.0.weight",
            &[3, 5, 2],
            Dtype::BF16,
            TensorKind::Parameter,
        ),
        ("blocks.0.bias", &[5], Dtype::F16, TensorKind::Parameter),
        ("one row", &[1, 9], Dtype::F64, TensorKind::Parameter),
        ("scalar", &[], Dtype::F32, TensorKind::Parameter),
        ("empty", &[0, 4], Dtype::F32, TensorKind::Parameter),
        ("blocks.0.mask", &[2, 8], Dtype::BOOL, TensorKind::Buffer),
        (
            "norm.\u{3bc} \"quoted\"\n",
            &[11],
            Dtype::I64,
            TensorKind::Buffer,
        ),
        ("blocks.0.ids", &[13], Dtype::U8, TensorKind::Buffer),
        (
            "optimizer/embedding.weight/moment_1",
            &[7, 15],
            Dtype::F32,
            TensorKind::OptimizerState,
        ),
        (
            "optimizer/embedding.weight/moment_2",
            &[7, 15],
            Dtype::F32,
            TensorKind::OptimizerState,
        ),
    ];
    let spec = |(name, shape, dtype, tensor_kind): (&str, &[usize], Dtype, TensorKind)| {
        TensorSpec::new(name, shape, dtype, tensor_kind, layout(kind, mesh, shape)).with("group", 0)
    };
    shapes.map(spec).to_vec()
}

pub fn line(num_ranks: usize) -> Mesh {
    Mesh::line("shard", num_ranks).expect("some ranks")
}

pub fn plan(mesh: &Mesh, kind: Kind) -> Arc<WritePlan> {
    Arc::new(WritePlan::new(mesh, tensors(mesh, kind)).expect("can be saved"))
}

pub fn training(step: u64) -> TrainingState {
    TrainingState {
        step,
        seed: u64::MAX,
        learning_rate: serde_json::json!({"base": 3e-4, "now": 0.1 + 0.2}),
        ..TrainingState::default()
    }
}

pub fn request(plan: &Arc<WritePlan>, step: u64) -> SaveRequest {
    let mut request = SaveRequest::new(Arc::clone(plan), training(step));
    request.model = serde_json::json!({"layers": 2});
    request
}

/// Saves on all ranks, each on a thread, and returns the results by rank.
pub fn save_all(checkpoints: &Checkpoints, request: &SaveRequest) -> Vec<Result<Saved, Error>> {
    let world_size = request.plan.mesh().size();
    let ends = ThreadRendezvous::new(world_size, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ends
            .into_iter()
            .map(|mut end| scope.spawn(move || save(checkpoints, request, &mut source, &mut end)))
            .collect();
        let joined = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
        joined.collect()
    })
}

pub fn save_step(checkpoints: &Checkpoints, plan: &Arc<WritePlan>, step: u64) {
    for saved in save_all(checkpoints, &request(plan, step)) {
        assert_eq!(saved.expect("saves").step, step);
    }
}

/// Asserts that every tensor of the step has the expected bytes.
pub fn assert_whole(step: &Step, tensors: &[TensorSpec]) {
    assert_eq!(step.index().tensors.len(), tensors.len());
    for tensor in tensors {
        let whole = Region::whole(&tensor.shape);
        let got = step.read(&tensor.name, &whole).expect("reads");
        assert_eq!(got, part_of(tensor, &whole), "{}", tensor.name);
    }
}
