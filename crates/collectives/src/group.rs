//! Ranks that communicate.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::engine::{Engine, Received, Request, Subgroup};
use crate::fake::FakeEnd;
use crate::local::World;
use crate::lock::lock;
use crate::operation::Signature;
use crate::pending::{Entry, Pending};
use crate::rank_state::RankState;
use crate::recording::Recording;
use crate::{
    At, BufferPool, CommSpan, CommStage, Error, Fault, Label, Ledger, Operation, OperationCounts,
};

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

/// Groups of the same ranks in the same order are equal, whatever they are called. Of fake groups,
/// whose ranks do not exist, the name tells.
impl PartialEq for ProcessGroup {
    fn eq(&self, other: &Self) -> bool {
        let are_known = !self.is_fake() && !other.is_fake();
        self.0.members == other.0.members && (are_known || self.name() == other.name())
    }
}

impl Eq for ProcessGroup {}

struct End {
    name: Label,
    rank: usize,
    size: usize,
    /// The ranks of the world that it consists of, in its order; of a fake one, as if they were all.
    members: Vec<usize>,
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
        members: Vec<usize>,
        engine: Box<dyn Engine>,
        state: Arc<RankState>,
    ) -> Self {
        Self(Arc::new(End {
            name,
            rank,
            size: members.len(),
            members,
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

    /// Rank `rank` of a group of `size` ranks of which no other exists, for tests and measurements on
    /// one thread: operations are counted, checked and given buffers as among real peers, and never
    /// wait.
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
        let state = Arc::new(RankState::new(rank));
        let engine = Box::new(FakeEnd { rank, size });
        Self::new("fake".into(), rank, (0..size).collect(), engine, state)
    }

    /// Whether the group was made by [`fake`](Self::fake): its other ranks do not exist.
    pub fn is_fake(&self) -> bool {
        !self.0.engine.has_peers()
    }

    /// A fake group out of this one, in which this rank is `rank` of `size`. Costs the operation
    /// that a real split would.
    pub(crate) fn split_fake(
        &self,
        size: usize,
        rank: usize,
        name: impl Into<Label>,
    ) -> Result<ProcessGroup, Error> {
        let name = name.into();
        self.exchange(format!("split into {}", name.as_str()), Vec::new())?;
        let engine = Box::new(FakeEnd { rank, size });
        let members = (0..size).collect();
        Ok(Self::new(name, rank, members, engine, self.0.state.clone()))
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

    /// Records from now on what this rank's operations, on any group, do when. `sample` gives a number
    /// that is noted at the end of each span, such as bytes that are alive; it must start no operation.
    pub fn start_recording(&self, sample: impl Fn() -> usize + Send + 'static) {
        *lock(&self.0.state.recording) = Some(Recording::new(sample));
    }

    /// Ends the recording, and returns the spans in the order in which they ended; none without a
    /// recording.
    pub fn end_recording(&self) -> Vec<CommSpan> {
        let recording = lock(&self.0.state.recording).take();
        recording.map(Recording::into_spans).unwrap_or_default()
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
        // This rank chose its own color, so it is among the members.
        let rank = members
            .iter()
            .take_while(|member| **member != self.0.rank)
            .count();
        let world = members.iter().map(|member| self.0.members[*member]);
        let world = world.collect();
        let subgroup = Subgroup {
            color,
            sequence,
            members,
            rank,
        };
        let engine = self.0.engine.subgroup(subgroup);
        Ok(Self::new(name, rank, world, engine, self.0.state.clone()))
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
        let start = Instant::now();
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
            operation: operation.clone(),
            signature,
            note,
            sources,
            into,
        };
        let flight = self.0.engine.start(request).inspect_err(|_| entry.fail())?;
        progress.sequence += 1;
        progress.counts.count(kind, bytes);
        let state = &self.0.state;
        state.note(&operation, CommStage::Start, bytes, start);
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
