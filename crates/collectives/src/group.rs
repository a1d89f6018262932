//! Ranks that communicate.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::engine::{Engine, Received, Request, Subgroup};
use crate::local::World;
use crate::lock::lock;
use crate::operation::Signature;
use crate::pending::{Entry, Pending};
use crate::rank_state::RankState;
use crate::{At, BufferPool, Error, Fault, Label, Ledger, Operation, OperationCounts};

/// One rank's end of a group of ranks that communicate. Cheap to clone.
///
/// Every rank of the group has its own end. An operation is *collective*: all ranks of the group
/// must start it, in the same order relative to the group's other operations, with the same label
/// and the same parts. The group numbers its operations, and operations of the same number belong
/// together; if they differ, every rank gets [`Error::Mismatch`].
///
/// A rank may use its end from any of its threads, but from one at a time: two threads that start
/// operations at once leave their order to chance.
#[derive(Clone)]
pub struct ProcessGroup(Arc<End>);

struct End {
    name: Label,
    rank: usize,
    size: usize,
    engine: Box<dyn Engine>,
    state: Arc<RankState>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Number of operations started: the sequence number of the next.
    sequence: u64,
    counts: OperationCounts,
}

impl ProcessGroup {
    pub(crate) fn new(
        name: Label,
        rank: usize,
        size: usize,
        engine: Box<dyn Engine>,
        state: Arc<RankState>,
    ) -> Self {
        Self(Arc::new(End {
            name,
            rank,
            size,
            engine,
            state,
            progress: Mutex::default(),
        }))
    }

    /// The group of a rank that is alone: its operations never wait. For code that takes a group, on
    /// a single rank and without [`launch`](crate::launch()).
    pub fn solo() -> Self {
        World::new(1, Duration::MAX).groups().swap_remove(0)
    }

    /// This rank's number in the group, from 0 on.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// What the group is called; `world` for the group of all ranks.
    pub fn name(&self) -> &str {
        self.0.name.as_str()
    }

    /// This rank's number in the world.
    pub fn world_rank(&self) -> usize {
        self.0.state.world_rank
    }

    /// The memory of this rank's operations, the same for all its groups.
    pub fn pool(&self) -> &BufferPool {
        &self.0.state.pool
    }

    /// The operations that this rank has started on this group so far.
    pub fn counts(&self) -> OperationCounts {
        lock(&self.0.progress).counts
    }

    /// This rank's last operations on any group.
    pub fn ledger(&self) -> Ledger {
        lock(&self.0.state.ledger).clone()
    }

    /// Divides the group: ranks that give the same `color` form a new group, ordered by `key`, and
    /// by their rank here where keys are equal. Collective; `name` must be the same on all ranks, also
    /// for different colors.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier).
    pub fn split(
        &self,
        color: usize,
        key: usize,
        name: impl Into<Label>,
    ) -> Result<ProcessGroup, Error> {
        let name = name.into();
        let choice = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let pending = self.start_exchange(format!("split into {}", name.as_str()), choice)?;
        let sequence = pending.operation().sequence;
        let mut members: Vec<_> = pending
            .wait()?
            .iter()
            .enumerate()
            .map(|(rank, choice)| (word(choice, 0), word(choice, 1), rank))
            .filter(|(others, ..)| *others == color)
            .collect();
        members.sort_unstable();
        let members: Vec<_> = members.into_iter().map(|(_, _, rank)| rank).collect();
        let size = members.len();
        // This rank chose its own color, so it is among the members.
        let rank = members
            .iter()
            .take_while(|member| **member != self.0.rank)
            .count();
        let subgroup = Subgroup {
            color,
            sequence,
            members,
            rank,
        };
        let engine = self.0.engine.subgroup(subgroup);
        Ok(Self::new(name, rank, size, engine, self.0.state.clone()))
    }

    /// Arms a fault: if it is this rank's, this rank will fail there, once. All ranks may be given
    /// the same fault.
    pub fn set_fault(&self, fault: Fault) {
        self.0.state.set_fault(fault);
    }

    /// Says that this rank begins a step, so that faults know when to strike.
    pub fn begin_step(&self, step: u64) {
        self.0.state.begin_step(step);
    }

    /// A place where an armed fault may strike.
    ///
    /// # Errors
    ///
    /// [`Error::Injected`] if a fault of kind `error` is armed for this rank, step and place.
    ///
    /// # Panics
    ///
    /// If a fault of kind `panic` is.
    pub fn fault_point(&self, at: At) -> Result<(), Error> {
        self.0.state.fault_point(at)
    }

    /// What the next operation will be called.
    pub(crate) fn next_operation(&self, signature: &Signature) -> Operation {
        let sequence = lock(&self.0.progress).sequence;
        self.operation(signature, sequence)
    }

    /// Starts an operation whose arguments are valid on this rank.
    pub(crate) fn start(
        &self,
        signature: Signature,
        contribution: Contribution,
    ) -> Result<Pending<Received>, Error> {
        self.fault_point(At::Collective)?;
        let mut progress = lock(&self.0.progress);
        let operation = self.operation(&signature, progress.sequence);
        let Contribution {
            note,
            sources,
            into,
            bytes,
        } = contribution;
        tracing::trace!(rank = self.world_rank(), %operation, bytes, "start");
        let mut entry = Entry::new(self.0.state.clone(), operation.clone(), bytes);
        let kind = signature.kind;
        let request = Request {
            operation,
            signature,
            note,
            sources,
            into,
        };
        let flight = self.0.engine.start(request).inspect_err(|_| entry.fail())?;
        progress.sequence += 1;
        progress.counts.count(kind, bytes);
        Ok(Pending::new(flight, entry, |received| received))
    }

    fn operation(&self, signature: &Signature, sequence: u64) -> Operation {
        let Signature { kind, label, .. } = signature;
        Operation {
            kind: *kind,
            label: label.clone(),
            group: self.0.name.clone(),
            sequence,
        }
    }
}

/// What a rank puts into an operation, and where it wants the results.
pub(crate) struct Contribution {
    pub(crate) note: Vec<u8>,
    pub(crate) sources: Vec<crate::Source>,
    pub(crate) into: Vec<crate::Buffer>,
    /// What the operation counts for.
    pub(crate) bytes: usize,
}

fn word(choice: &[u8], index: usize) -> usize {
    let (words, _) = choice.as_chunks::<{ size_of::<usize>() }>();
    words
        .get(index)
        .map_or(0, |word| usize::from_le_bytes(*word))
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ProcessGroup({}, rank {} of {})",
            self.0.name,
            self.rank(),
            self.size()
        )
    }
}
