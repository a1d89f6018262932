//! Groups with a single existing rank: a group of one, and a group with simulated peers.

use std::time::Duration;

use super::worlds;
use crate::group::ProcessGroup;
use burn_fsdp_rendezvous::Check;

impl ProcessGroup {
    /// Returns a group with a single rank, whose operations never wait. Code that needs a group can then run without
    /// [`launch`](crate::launch()).
    pub fn solo() -> Self {
        worlds::of_threads(1, Duration::MAX, Check::Calls).swap_remove(0)
    }

    /// Returns the handle of rank `rank`, the only existing rank of a group of `size` ranks. It is for tests and
    /// measurements on one thread. Operations are counted and checked and use buffers as with real peers, but never
    /// wait.
    ///
    /// The other ranks are assumed to contribute the same as this one. An all-gather puts this rank's shard in every
    /// rank's place as far as it fits; the rest is zero. A reduction combines `size` copies. Notes and exchanges are
    /// returned `size` times. Data that another rank would have sent, as the root of a broadcast or a scatter, is zero;
    /// rank 0 has real initial values. In a [`split`](Self::split) all ranks make the same choice;
    /// [`ProcessMesh`](crate::ProcessMesh) creates groups of the right sizes.
    ///
    /// # Panics
    ///
    /// If `rank` is not below `size`.
    ///
    /// ```
    /// use burn_fsdp_collectives::{OperationKind, ProcessGroup};
    ///
    /// # fn main() -> Result<(), burn_fsdp_collectives::Error> {
    /// let group = ProcessGroup::fake(8, 3);
    /// group.barrier("nobody to wait for")?;
    /// assert_eq!(group.counts().of(OperationKind::Barrier).operations, 1);
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn fake(size: usize, rank: usize) -> Self {
        assert!(rank < size, "rank {rank} of a group of {size} ranks");
        worlds::of_one(size, rank)
    }
}
