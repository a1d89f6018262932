//! Groups of ranks that communicate.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use super::checked::Checked;
use super::pending::{Entry, Peers, Pending};
use super::received::Received;
use super::started::{Started, Wanted};
use burn_fsdp_rendezvous::{
    At, Carried, Checks, Claim, CommSpan, CommStage, Control, Error, Fault, GroupId, Label, Ledger,
    Operation, OperationCounts, RankState, Signature,
};
use burn_fsdp_transport::{Buffer, BufferPool, Engine, Request, Source, Space};

/// A rank's handle to a group of ranks that communicate. Cheap to clone.
///
/// Every rank of the group has one. An operation is *collective*: all ranks of the group must start it with the same
/// label and the same parts. The order relative to the group's other operations must also be the same. The group
/// numbers its operations, and operations with the same number belong together. If they differ, every rank gets
/// [`Error::Mismatch`].
///
/// A rank may use its handle from any of its threads, but only from one at a time. If two threads start operations at
/// once, their order is undefined.
#[derive(Clone)]
pub struct ProcessGroup(pub(super) Arc<Handle>);

pub(super) struct Handle {
    name: Label,
    pub(super) rank: usize,
    id: GroupId,
    pub(super) engine: Box<dyn Engine>,
    pub(super) state: Arc<RankState>,
    pub(super) pool: BufferPool,
    progress: Mutex<Progress>,
    /// The comparison of bytes, with [`Check::Agreement`](crate::Check::Agreement).
    pub(super) checked: Option<Arc<Checked>>,
}

#[derive(Default)]
struct Progress {
    /// Number of started operations, which is the sequence number of the next.
    sequence: u64,
    counts: OperationCounts,
}

impl ProcessGroup {
    /// Returns a rank's handle to a group with these ranks of the world.
    pub(crate) fn new(
        name: Label,
        rank: usize,
        members: Arc<[usize]>,
        engine: Box<dyn Engine>,
        (state, pool): (Arc<RankState>, BufferPool),
    ) -> Self {
        let control = engine.control();
        let id = GroupId::new(control.world().number(), members);
        let checked = Checked::new((&id, rank), &state, control);
        Self(Arc::new(Handle {
            name,
            rank,
            id,
            engine,
            state,
            pool,
            progress: Mutex::default(),
            checked,
        }))
    }

    /// Returns true if the group was created by [`fake`](Self::fake), so its other ranks do not exist.
    pub fn is_fake(&self) -> bool {
        !self.0.engine.has_peers()
    }

    /// Returns the name of the engine that moves the group's bytes: `local`, `mpi`, `fake`, or the name of a [custom
    /// engine](Self::on_engine).
    pub fn engine(&self) -> &'static str {
        self.0.engine.name()
    }

    /// Returns true if the group's engine moves bytes while its ranks compute, so an operation started early overlaps
    /// with computation. Ranks that are threads of one process move bytes while they wait. There, starting early costs
    /// memory and saves nothing.
    pub fn overlaps(&self) -> bool {
        self.0.engine.overlaps()
    }

    /// Returns this rank's number in the group, starting at 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of ranks in the group.
    pub fn size(&self) -> usize {
        self.members().len()
    }

    /// Returns the world ranks of the members, in the order of their ranks in this group.
    pub fn members(&self) -> &[usize] {
        self.0.id.members()
    }

    /// Returns the identity of the group: its launch and its ranks. It is equal for groups with the same members in the
    /// same order, regardless of their names and how they were created.
    pub fn id(&self) -> &GroupId {
        &self.0.id
    }

    /// Returns the name of the group; `world` for the group of all ranks.
    pub fn name(&self) -> &str {
        self.0.name.as_str()
    }

    /// Returns this rank's number in the world.
    pub fn world_rank(&self) -> usize {
        self.0.state.world_rank()
    }

    /// Returns this rank's memory pool for operations, shared by all its groups.
    pub fn pool(&self) -> &BufferPool {
        &self.0.pool
    }

    /// Returns the counts of the operations that this rank has started on this group so far.
    pub fn counts(&self) -> OperationCounts {
        self.0.progress.lock().counts
    }

    /// Returns this rank's last operations, on all its groups.
    pub fn ledger(&self) -> Ledger {
        self.0.state.ledger()
    }

    /// Starts recording the times of this rank's operations, on all its groups. `sample` returns a number to store at
    /// the end of each span, such as the live bytes. It must not start an operation.
    pub fn start_recording(&self, sample: impl Fn() -> usize + Send + 'static) {
        self.0.state.start_recording(sample);
    }

    /// Ends the recording and returns the spans in the order in which they ended. Returns no spans without a recording.
    pub fn end_recording(&self) -> Vec<CommSpan> {
        self.0.state.end_recording()
    }

    /// Registers `watch`, which is called with the checksums of each completed operation of this rank, on any group. It
    /// is called only if ranks compare bytes ([`Check::Agreement`](crate::Check::Agreement)). It must not start an operation.
    pub fn watch(&self, watch: impl FnMut(Carried) + Send + 'static) {
        self.0.state.watch(watch);
    }

    /// Returns true if the ranks compare bytes ([`Check::Agreement`](crate::Check::Agreement)).
    pub fn compares_bytes(&self) -> bool {
        self.0.checked.is_some()
    }

    /// Arms a fault. If it names this rank, this rank fails once at the fault's point. All ranks may arm the same
    /// fault.
    pub fn set_fault(&self, fault: Fault) {
        self.0.state.set_fault(fault);
    }

    /// Marks the beginning of a step on this rank. Faults and seals refer to the step's number.
    pub fn begin_step(&self, step: u64) {
        self.0.state.begin_step(step);
    }

    /// Triggers a fault if one is armed for this point.
    ///
    /// # Errors
    ///
    /// [`Error::Injected`] if a fault of kind `error` is armed for this rank, step and place.
    ///
    /// # Panics
    ///
    /// If a fault of kind `panic` is armed for this rank, step and place.
    pub fn fault_point(&self, at: At) -> Result<(), Error> {
        self.0.state.fault_point(at)
    }

    /// Returns true if a bit is to flip at this point in this step. If not, callers can skip a costly search for the
    /// bit.
    pub fn awaits_flip(&self, at: At) -> bool {
        self.0.state.awaits_flip(at)
    }

    /// Returns the bit to flip in `num_bytes` bytes at this point, if a fault is armed for it. The caller flips that
    /// bit in its value and continues normally.
    pub fn flips(&self, at: At, num_bytes: usize) -> Option<usize> {
        self.0.state.flips_now(at, num_bytes)
    }

    /// Returns the identity that the next operation will have.
    pub(crate) fn next_operation(&self, signature: &Signature) -> Operation {
        let sequence = self.0.progress.lock().sequence;
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
        let mut progress = self.0.progress.lock();
        let operation = self.operation(&signature, progress.sequence);
        let Contribution {
            note,
            mut sources,
            into,
            bytes,
        } = contribution;
        let checks = match &self.0.checked {
            // If ranks read in place, a rank that receives an all-gather reads its own source later, and checks it then.
            Some(checked) => {
                let reads_later = !into.is_empty() && self.0.engine.reads_in_place();
                checked.announce(&signature, &sources, reads_later)?
            }
            None => Checks::default(),
        };
        self.flip_if_told(&mut sources);
        tracing::trace!(rank = self.world_rank(), %operation, bytes, "start");
        let mut entry = Entry::new(self.0.state.clone(), operation.clone(), bytes);
        let kind = signature.kind;
        self.control()
            .check(&operation)
            .inspect_err(|_| entry.fail())?;
        let request = Request {
            operation: operation.clone(),
            claim: Claim {
                signature,
                note,
                checks,
            },
            sources,
            into,
        };
        let wanted = Wanted::new(&request.into);
        let started = Started::new(&*self.0.engine, request);
        progress.sequence += 1;
        progress.counts.count(kind, bytes);
        let state = &self.0.state;
        state.note(&operation, CommStage::Start, bytes, start);
        let peers = Peers {
            id: self.0.id.clone(),
            world_rank: self.world_rank(),
            engine: self.engine(),
            control: self.control().clone(),
            checked: self.0.checked.clone(),
            _handle: self.0.clone(),
        };
        Ok(Pending::new(peers, (started, wanted), entry, |received| {
            received
        }))
    }

    /// Flips a bit of the bytes that this rank contributes, if a fault is armed for it.
    fn flip_if_told(&self, sources: &mut [Source]) {
        for source in sources {
            if source.host().is_none() {
                continue;
            }
            if let Some(bit) = self.flips(At::Collective, source.len()) {
                let mut bytes = source.as_bytes().to_vec();
                bytes[bit / 8] ^= 1 << (bit % 8);
                *source = Source::new(bytes);
            }
        }
    }

    /// Returns true if the group's engine accepts sources and buffers in this memory, and the ranks need not read them
    /// on the host for a comparison.
    pub(crate) fn takes(&self, space: Space) -> bool {
        let is_read = self.compares_bytes() && space != Space::Host;
        !is_read && self.0.engine.takes(space)
    }

    /// Returns true if the group's engine moves bytes in the memory of devices, because its ranks are threads of this
    /// process. It does not if ranks compare bytes ([`Check::Agreement`](crate::Check::Agreement)), which they read on
    /// the host.
    pub fn shares_devices(&self) -> bool {
        !self.compares_bytes() && self.0.engine.shares_devices()
    }

    /// Returns the failure domain of the group.
    pub(crate) fn control(&self) -> &Arc<Control> {
        self.0.engine.control()
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

/// A rank's input to an operation, and its buffers for the results.
pub(crate) struct Contribution {
    pub(crate) note: Vec<u8>,
    pub(crate) sources: Vec<Source>,
    pub(crate) into: Vec<Buffer>,
    /// The bytes that are counted for the operation.
    pub(crate) bytes: usize,
}

/// Equal if the [ids](ProcessGroup::id) are equal.
impl PartialEq for ProcessGroup {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for ProcessGroup {}

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
