//! Counting the operations of a section of a program.

use std::fmt;

use super::process_group::ProcessGroup;
use burn_fsdp_rendezvous::{OperationCounts, OperationKind};

/// Counts the operations that this rank starts on some groups after the counter was created.
///
/// ```
/// use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessGroup};
///
/// # fn main() -> Result<(), burn_fsdp_collectives::Error> {
/// let group = ProcessGroup::fake(4, 0);
/// let counter = CommCounter::new([&group]);
/// group.barrier("before the step")?;
/// counter.expect(&[(OperationKind::Barrier, 1)]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CommCounter {
    groups: Vec<(ProcessGroup, OperationCounts)>,
}

impl CommCounter {
    /// Starts counting. Pass each group only once; a clone counts as the same group.
    pub fn new<'a>(groups: impl IntoIterator<Item = &'a ProcessGroup>) -> Self {
        let groups = groups.into_iter();
        Self {
            groups: groups
                .map(|group| (group.clone(), group.counts()))
                .collect(),
        }
    }

    /// Restarts the count.
    pub fn reset(&mut self) {
        for (group, before) in &mut self.groups {
            *before = group.counts();
        }
    }

    /// Returns the counts of the operations since counting started, summed over all groups.
    pub fn counts(&self) -> OperationCounts {
        self.by_group()
            .map(|(_, counts)| counts)
            .fold(OperationCounts::default(), |sum, counts| sum + counts)
    }

    /// Returns each group with the counts of its operations since counting started, in the order passed to
    /// [`new`](Self::new).
    pub fn by_group(&self) -> impl Iterator<Item = (&ProcessGroup, OperationCounts)> {
        let since =
            |(group, before): &'_ (ProcessGroup, OperationCounts)| group.counts().since(before);
        self.groups
            .iter()
            .map(move |entry| (&entry.0, since(entry)))
    }

    /// Asserts the number of operations of each kind on all groups together. A kind that is not listed must have none.
    ///
    /// # Panics
    ///
    /// If a number differs. The message lists everything that was counted.
    #[track_caller]
    pub fn expect(&self, expected: &[(OperationKind, u64)]) {
        let counts = self.counts();
        for kind in OperationKind::ALL {
            let named = expected.iter().filter(|(named, _)| *named == kind);
            let wanted: u64 = named.map(|(_, number)| number).sum();
            let got = counts.of(kind).operations;
            assert!(
                got == wanted,
                "expected {wanted} {kind}, got {got}; counted: {self}"
            );
        }
    }
}

/// Prints as `shard: 3 all_gather (120 bytes); replicate: none`.
impl fmt::Display for CommCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (group, counts)) in self.by_group().enumerate() {
            let separator = if index > 0 { "; " } else { "" };
            write!(f, "{separator}{}: {counts}", group.name())?;
        }
        Ok(())
    }
}
