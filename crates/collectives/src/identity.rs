//! Which ranks a group has.

use std::fmt;
use std::sync::Arc;

/// Which ranks of which launch a group has, in which order. Cheap to clone.
///
/// Groups with the same id give the same results, so this and not the name tells whether two groups
/// are one. Ids are compared within one rank; of two ranks, compare the members.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct GroupId {
    /// Tells the launches of one process apart.
    world: u64,
    members: Arc<[usize]>,
}

impl GroupId {
    pub(crate) fn new(world: u64, members: Arc<[usize]>) -> Self {
        Self { world, members }
    }

    /// The members by their rank in the world, in the order of their rank in the group.
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
