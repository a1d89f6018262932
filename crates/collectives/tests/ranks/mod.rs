//! Running a body on ranks, and values as bytes.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test file uses another part of this"
)]

use std::time::Duration;

use burn_fsdp_collectives::{
    Buffer, ElementType, Error, FullPart, LaunchConfig, LaunchError, Part, Partition, ProcessGroup,
    Source, launch,
};

/// Far longer than any test takes, far shorter than anyone waits.
pub const LONG: Duration = Duration::from_secs(30);

/// The deadline of tests in which a rank does not come. A rank that does come is late by more only on
/// a machine that stands still.
pub const SHORT: Duration = Duration::from_secs(2);

/// The ranks' results; every error is a test failure.
pub fn run<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    launch(LaunchConfig::new(ranks).deadline(LONG), body).unwrap()
}

/// The ranks' results, errors among them: each rank reports what it saw.
pub fn observe<T: Send + 'static>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<Result<T, Error>> {
    let config = LaunchConfig::new(ranks).deadline(deadline);
    launch(config, move |world| Ok::<_, Error>(body(world))).unwrap()
}

/// Why the launch failed.
pub fn fail(
    config: LaunchConfig,
    body: impl Fn(ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
) -> LaunchError {
    launch(config, body).unwrap_err()
}

/// The values as a source.
pub fn source<T: bytemuck::Pod>(values: &[T]) -> Source {
    Source::new(bytemuck::cast_slice(values).to_vec())
}

/// The values in a buffer.
pub fn values<T: bytemuck::Pod>(buffer: &Buffer) -> Vec<T> {
    bytemuck::cast_slice(buffer.as_ref()).to_vec()
}

/// `f32` values that tell ranks and elements apart, none of them round.
pub fn floats(rank: usize, num_elements: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + rank * 101) % 211) as f32 / 7.0 - 11.0;
    (0..num_elements).map(value).collect()
}

/// A flat cut among the ranks of the group.
pub fn flat(group: &ProcessGroup, num_elements: usize) -> Partition {
    Partition::flat(num_elements, group.size()).unwrap()
}

/// This rank's shard of the `f32` values `0, 1, 2, ...`.
pub fn counting(group: &ProcessGroup, num_elements: usize) -> Part {
    let partition = flat(group, num_elements);
    let shard: Vec<_> = partition.range(group.rank()).map(|i| i as f32).collect();
    Part::new(source(&shard), partition, ElementType::F32)
}

/// An all-gather of `num_elements` `f32` values, as a call to go right or wrong.
pub fn gather(group: &ProcessGroup, label: &str, num_elements: usize) -> Result<Vec<f32>, Error> {
    let into = vec![group.pool().take(num_elements * 4)];
    let received =
        group.all_gather(label, Vec::new(), vec![counting(group, num_elements)], into)?;
    Ok(values(&received.buffers[0]))
}

/// A full `f32` tensor of this rank.
pub fn full(group: &ProcessGroup, num_elements: usize) -> FullPart {
    FullPart::new(
        source(&floats(group.rank(), num_elements)),
        ElementType::F32,
    )
}
