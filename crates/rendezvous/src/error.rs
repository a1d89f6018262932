//! The errors of a collective operation.

use std::fmt;
use std::time::Duration;

use super::fault::Fault;
use super::ledger::LedgerReport;
use super::operation::Operation;
use super::seal::Moment;

/// The reason why an operation did not return its result. Rank numbers are ranks of the world.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call by this rank that is invalid regardless of the other ranks. The rank took no part in the operation.
    #[error(
        "rank {rank}: in {operation}, {argument} should be {expected} but is {got}; correct this rank's call"
    )]
    Argument {
        /// The rank that called.
        rank: usize,
        /// The operation that it called.
        operation: Box<Operation>,
        /// The name of the argument, such as `into[2]`.
        argument: String,
        /// The expected value.
        expected: String,
        /// The value that was passed.
        got: String,
    },

    /// Different operations on the ranks of a group, or the same operation with different tensors. Every waiting rank
    /// gets this error.
    #[error(
        "the ranks of group {group} differ in operation {sequence}: rank {rank} called {expected}; \
         rank {peer} called {got}; make all ranks of a group call the same operations in the same \
         order, with the same labels, parts and reductions; {ledger}",
        group = operation.group, sequence = operation.sequence
    )]
    Mismatch {
        /// The operation that this rank called.
        operation: Box<Operation>,
        /// The first rank of the group.
        rank: usize,
        /// The call of the first rank.
        expected: String,
        /// The first rank that called something else.
        peer: usize,
        /// The call of the rank `peer`.
        got: String,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// A rank that panicked, returned an error or encountered one of these errors before this operation was complete.
    #[error(
        "{operation} cannot complete because rank {rank} failed: {reason}; fix that failure first; {ledger}"
    )]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// The description of the failure.
        reason: String,
        /// The operation that this rank called.
        operation: Box<Operation>,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// A rank that returned from its closure while others were still waiting for it.
    #[error(
        "rank {rank} returned without starting {operation}; make all ranks of a group call the same \
         operations before they return; {ledger}"
    )]
    PeerLeft {
        /// The rank that returned.
        rank: usize,
        /// The operation that this rank called.
        operation: Box<Operation>,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// Ranks that did not arrive within the deadline.
    #[error(
        "rank {rank} waited {deadline:?} for ranks {missing:?} to {stage} {operation}{}; check below what they did \
         instead, or set a longer deadline (LaunchConfig::deadline, or the isolated group's deadline) if they are \
         only slow; {ledger}",
        in_the_end(missing, ends)
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
        /// The ranks at the end of the chain of waits. Missing ranks may themselves have waited for other ranks. Empty
        /// if all waited for each other.
        ends: Vec<usize>,
        /// The part of the operation that the missing ranks had to do.
        stage: Stage,
        /// The operation that this rank called.
        operation: Box<Operation>,
        /// The deadline that passed.
        deadline: Duration,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// Received bytes that differ from the bytes that were sent, with [`Check::Agreement`](crate::Check::Agreement).
    #[error(
        "{}rank {rank} received different bytes for tensor {part} of {operation} than rank {peer} passed to the call; \
         the memory of one of the two or the link between them is faulty: resume from the last checkpoint without \
         that machine; {ledger}",
        in_step(step)
    )]
    Altered {
        /// The operation that carried the bytes.
        operation: Box<Operation>,
        /// The step that was passed to `ProcessGroup::begin_step`, if any.
        step: Option<u64>,
        /// The rank that received the bytes.
        rank: usize,
        /// The rank that sent the bytes.
        peer: usize,
        /// The index of the tensor among the parts of the operation.
        part: usize,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// A result that differs between the ranks although all received the result of the same operation, with
    /// [`Check::Agreement`](crate::Check::Agreement). Detected in a later operation of the group.
    #[error(
        "{}ranks {ranks:?} hold a different result of {operation} than most ranks of the group, or there is no \
         majority; the memory or the link of one of them is faulty: resume from the last checkpoint without that \
         machine; {ledger}",
        in_step(step)
    )]
    Disagreement {
        /// The operation that returned the result.
        operation: Box<Operation>,
        /// The step in which the difference was found.
        step: Option<u64>,
        /// The ranks whose result differs from the majority's; all ranks if no majority agrees.
        ranks: Vec<usize>,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// A value whose bytes have changed in a rank's memory between two of its operations although nothing wrote them,
    /// with [`Check::Agreement`](crate::Check::Agreement). Detected by the rank itself or by a rank that reads the
    /// value there.
    #[error(
        "{}rank {rank} found that the bytes of {what} changed although nothing wrote to them: they were intact \
         {written}, and changed {found}; the memory of rank {rank} is faulty: resume from the last checkpoint \
         without that machine; {ledger}",
        in_step(&found.step)
    )]
    AlteredAtRest {
        /// The value, described by its kind, its parameter's path and its unit.
        what: String,
        /// The rank that holds the value.
        rank: usize,
        /// The moment at which the value was written or last checked.
        written: Box<Moment>,
        /// The moment at which the change was found.
        found: Box<Moment>,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// A replicated value that differs between the ranks, with [`Check::Agreement`](crate::Check::Agreement). Detected
    /// in the operation after the one that announced the value.
    #[error(
        "{}ranks {ranks:?} hold different bytes in {what} than most ranks of the group, or there is no majority; \
         one of them computed it incorrectly, or its memory is faulty: resume from the last checkpoint without that \
         machine; {ledger}",
        in_step(step)
    )]
    Diverged {
        /// The value, described by its kind, its parameter's path and its unit.
        what: String,
        /// The step in which the difference was found.
        step: Option<u64>,
        /// The ranks whose bytes differ from the majority's; all ranks if no majority agrees.
        ranks: Vec<usize>,
        /// The last operations of the ranks.
        ledger: LedgerReport,
    },

    /// An engine that broke its contract.
    #[error(
        "rank {rank}: engine `{engine}` should have returned {expected} for {operation} but returned {got}; correct the \
         engine, or run the group on the engine that it was made from"
    )]
    Engine {
        /// The rank whose engine broke the contract.
        rank: usize,
        /// The name of the engine.
        engine: &'static str,
        /// The operation that the engine carried out.
        operation: Box<Operation>,
        /// The result that the engine should have returned.
        expected: String,
        /// The result that the engine returned.
        got: String,
    },

    /// A failure that was requested; see [`Fault`].
    #[error("the fault \"{fault}\" made this rank fail; remove the fault to continue")]
    Injected {
        /// The fault that triggered.
        fault: Fault,
    },

    /// A fault that cannot be parsed.
    #[error(
        "cannot parse the fault \"{text}\": {problem}; write it as {}",
        Fault::SYNTAX
    )]
    InvalidFault {
        /// The text that was parsed.
        text: String,
        /// The reason why the text cannot be parsed.
        problem: String,
    },

    /// A fault that was requested from a program without fault injection.
    #[error(
        "the fault \"{text}\" cannot happen, because this program was built without fault injection; build it with \
         the feature `faults`, or do not request a fault"
    )]
    NoFaults {
        /// The requested fault.
        text: String,
    },

    /// A mesh whose number of ranks differs from the group's.
    #[error(
        "mesh {mesh} has {mesh_size} ranks, but group \"{group}\" has {group_size}; make the product of the mesh \
         axes {group_size}"
    )]
    MeshSize {
        /// The mesh, formatted for display.
        mesh: String,
        /// Number of ranks in the mesh.
        mesh_size: usize,
        /// Name of the group.
        group: String,
        /// Number of ranks in the group.
        group_size: usize,
    },

    /// An invalid mesh or partition.
    #[error(transparent)]
    Mesh(#[from] burn_fsdp_mesh::Error),
}

/// The part of an operation that a rank waits for its peers to complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// The start of the operation.
    Start,
    /// The completion of the peers' share of the operation.
    Finish,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Finish => "finish",
        })
    }
}

fn in_step(step: &Option<u64>) -> String {
    step.map_or_else(String::new, |step| format!("in step {step}, "))
}

fn in_the_end(missing: &[usize], ends: &[usize]) -> String {
    if ends.is_empty() {
        return ", which all wait for each other".to_owned();
    }
    if ends == missing {
        String::new()
    } else {
        format!(", and ultimately for ranks {ends:?}, which wait for no other rank")
    }
}
