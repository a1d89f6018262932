//! Helpers that run a body on ranks, and convert values to bytes.
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

/// Far longer than any test takes, far shorter than anyone would wait.
pub const LONG: Duration = Duration::from_secs(30);

/// The deadline of tests in which a rank does not arrive. A rank that does arrive is later than this only on a machine
/// that is suspended.
pub const SHORT: Duration = Duration::from_secs(2);

/// Returns the ranks' results; every error is a test failure.
pub fn run<T: Send + 'static>(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<T> {
    launch(LaunchConfig::new(ranks).deadline(LONG), body).unwrap()
}

/// Returns the ranks' results including errors: each rank reports what it saw.
pub fn observe<T: Send + 'static>(
    ranks: usize,
    deadline: Duration,
    body: impl Fn(ProcessGroup) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<Result<T, Error>> {
    let config = LaunchConfig::new(ranks).deadline(deadline);
    launch(config, move |world| Ok::<_, Error>(body(world))).unwrap()
}

/// Returns the reason why the launch failed.
pub fn fail(
    config: LaunchConfig,
    body: impl Fn(ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
) -> LaunchError {
    launch(config, body).unwrap_err()
}

/// Returns the values as a source.
pub fn source<T: bytemuck::Pod>(values: &[T]) -> Source {
    Source::new(bytemuck::cast_slice(values).to_vec())
}

/// Returns the values in a buffer.
pub fn values<T: bytemuck::Pod>(buffer: &Buffer) -> Vec<T> {
    bytemuck::cast_slice(buffer.as_ref()).to_vec()
}

/// Returns `f32` values that differ by rank and element, none of them round.
pub fn floats(rank: usize, num_elements: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + rank * 101) % 211) as f32 / 7.0 - 11.0;
    (0..num_elements).map(value).collect()
}

/// Returns a flat partition among the ranks of the group.
pub fn flat(group: &ProcessGroup, num_elements: usize) -> Partition {
    Partition::flat(num_elements, group.size()).unwrap()
}

/// Returns this rank's shard of the `f32` values `0, 1, 2, ...`.
pub fn counting(group: &ProcessGroup, num_elements: usize) -> Part {
    let partition = flat(group, num_elements);
    let shard: Vec<_> = partition.range(group.rank()).map(|i| i as f32).collect();
    Part::new(source(&shard), partition, ElementType::F32)
}

/// Runs an all-gather of `num_elements` `f32` values, as a call that may succeed or fail.
pub fn gather(group: &ProcessGroup, label: &str, num_elements: usize) -> Result<Vec<f32>, Error> {
    let into = vec![group.pool().take(num_elements * 4)];
    let received =
        group.all_gather(label, Vec::new(), vec![counting(group, num_elements)], into)?;
    Ok(values(&received.buffers[0]))
}

/// Returns a full `f32` tensor of this rank.
pub fn full(group: &ProcessGroup, num_elements: usize) -> FullPart {
    FullPart::new(
        source(&floats(group.rank(), num_elements)),
        ElementType::F32,
    )
}
