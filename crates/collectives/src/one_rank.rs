//! Groups of which one rank is there: the one that is alone, and the one whose peers are made up.

use std::time::Duration;

use crate::{Check, ProcessGroup, fake, local};

impl ProcessGroup {
    /// Returns the group of a rank that is alone: its operations never wait. For code that takes a
    /// group, on a single rank and without [`launch`](crate::launch()).
    pub fn solo() -> Self {
        local::groups(1, Duration::MAX, Check::Calls).swap_remove(0)
    }

    /// Returns rank `rank` of a group of `size` ranks of which no other exists, for tests and measurements on
    /// one thread: operations are counted, checked and given buffers as among real peers, and never wait.
    ///
    /// The other ranks are taken to contribute what this one does. An all-gather puts this rank's
    /// shard in every rank's place as far as it fits, the rest is zero; a reduction combines `size`
    /// copies; notes and exchanges come back `size` times. What another rank would have sent, as the
    /// root of a broadcast or a scatter, is zero: rank 0 has real initial values.
    /// [`split`](Self::split) finds that all ranks have chosen alike; [`ProcessMesh`](crate::ProcessMesh)
    /// makes groups of the right sizes.
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
        fake::group(size, rank)
    }
}
