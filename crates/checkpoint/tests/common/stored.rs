//! A step in memory whose files can be changed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::Memory;
use burn_fsdp_checkpoint::{
    Checkpoints, Dtype, Error, Layout, Step, TensorKind, TensorSpec, WritePlan,
};

use super::Kind;

pub const FILES: [&str; 4] = [
    "index.json",
    "index.json.crc32",
    "rank-00000.safetensors",
    "rank-00001.safetensors",
];

pub fn checkpoints(memory: &Memory) -> Checkpoints {
    Checkpoints::with_storage(Arc::new(memory.clone()), "run")
}

pub fn in_step(step: u64, file: &str) -> PathBuf {
    Path::new("run").join(format!("step-{step:06}")).join(file)
}

/// Returns a plan of small tensors of all kinds, and one with several chunks per rank.
pub fn plan() -> Arc<WritePlan> {
    let mesh = super::line(2);
    let mut tensors = super::tensors(&mesh, Kind::Flat);
    let layout = Layout::dim(&mesh, "shard", 1).expect("an axis");
    let shape = [700, 1001];
    tensors.push(TensorSpec::new(
        "big",
        shape,
        Dtype::F32,
        TensorKind::Parameter,
        layout,
    ));
    Arc::new(WritePlan::new(&mesh, tensors).expect("fits"))
}

pub fn copy(memory: &Memory, step: u64) -> Vec<Vec<u8>> {
    let read = |file: &&str| memory.read(&in_step(step, file)).expect("there");
    FILES.iter().map(read).collect()
}

pub fn assert_names(error: &Error, text: &str) {
    let message = error.to_string();
    assert!(message.contains(text), "{message:?} does not name {text:?}");
}

/// Opens step 1 with another index, sealed.
pub fn with_index_text(memory: &Memory, json: String) -> Result<Step, Error> {
    let seal = format!("{:08x} {}\n", crc32fast::hash(json.as_bytes()), json.len());
    memory
        .write(&in_step(1, FILES[0]), json.into_bytes())
        .expect("in memory");
    memory
        .write(&in_step(1, FILES[1]), seal.into_bytes())
        .expect("in memory");
    checkpoints(memory).open(1)
}
