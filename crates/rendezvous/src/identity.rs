//! The identity of a group: its ranks.

use std::fmt;
use std::sync::Arc;

/// The identity of a group: its launch, and its ranks in their order. Cheap to clone.
///
/// Operations on groups with the same id have the same results. To test whether two groups are the same, compare ids,
/// not names. Compare ids only within one process; across processes, compare the members.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct GroupId {
    /// Number of the launch, unique in the process.
    world: u64,
    members: Arc<[usize]>,
}

impl GroupId {
    /// Returns the identity of a group of these ranks, in a launch with this number.
    pub fn new(world: u64, members: Arc<[usize]>) -> Self {
        Self { world, members }
    }

    /// Returns the members by their rank in the world, in the order of their rank in the group.
    #[inline]
    pub fn members(&self) -> &[usize] {
        &self.members
    }
}

/// Prints as `ranks [0, 2]`.
impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ranks {:?}", self.members)
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({self} of world {})", self.world)
    }
}
