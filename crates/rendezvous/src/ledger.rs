//! The last operations of every rank, kept to explain failures.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use super::operation::Operation;
use super::waits::LongWait;

/// The state of an operation in a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EntryState {
    /// A started operation whose wait is not over.
    Started,
    /// An operation whose result this rank has.
    Done,
    /// An operation that ended in an error.
    Failed,
    /// An operation whose pending handle was dropped without being waited for.
    Discarded,
}

impl fmt::Display for EntryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Started => "started",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Discarded => "discarded",
        })
    }
}

/// An operation of one rank, with its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// The identity of the operation.
    pub operation: Operation,
    /// Bytes of the operation's full tensors.
    pub bytes: usize,
    /// The state of the operation.
    pub state: EntryState,
}

impl fmt::Display for LedgerEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} bytes: {}",
            self.operation, self.bytes, self.state
        )
    }
}

/// The last [`CAPACITY`](Self::CAPACITY) operations that one rank started on any group, oldest
/// first.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    entries: VecDeque<LedgerEntry>,
    /// Number of operations recorded in total.
    num_recorded: u64,
}

impl Ledger {
    /// The number of operations that a ledger keeps.
    pub const CAPACITY: usize = 32;

    /// Returns the operations, oldest first.
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &LedgerEntry> + ExactSizeIterator {
        self.entries.iter()
    }

    /// Returns the number of operations that this rank has started in total.
    pub fn num_recorded(&self) -> u64 {
        self.num_recorded
    }

    /// Adds an operation, and drops the oldest one if the ledger is full. Returns the number to pass to
    /// [`settle`](Self::settle).
    pub(crate) fn record(&mut self, operation: Operation, bytes: usize) -> u64 {
        if self.entries.len() == Self::CAPACITY {
            self.entries.pop_front();
        }
        self.entries.push_back(LedgerEntry {
            operation,
            bytes,
            state: EntryState::Started,
        });
        self.num_recorded += 1;
        self.num_recorded - 1
    }

    /// Records the outcome of an operation, if the ledger still has it.
    pub(crate) fn settle(&mut self, number: u64, state: EntryState) {
        let oldest = self.num_recorded - self.entries.len() as u64;
        let index = number
            .checked_sub(oldest)
            .and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
            entry.state = state;
        }
    }

    fn last(&self, num_entries: usize) -> Vec<LedgerEntry> {
        let skipped = self.entries.len().saturating_sub(num_entries);
        self.entries.iter().skip(skipped).cloned().collect()
    }
}

/// Prints one operation per line.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries
            .iter()
            .try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

/// The last operations of the world's ranks at the moment of a failure, as far as the ranks live in this process. Cheap
/// to clone.
#[derive(Debug, Clone)]
pub struct LedgerReport(Arc<[Known]>);

/// The entries of one rank in a report.
#[derive(Debug)]
struct Known {
    entries: Vec<LedgerEntry>,
    /// True if the rank lives in this process.
    is_here: bool,
    /// The wait that the rank has announced.
    wait: Option<LongWait>,
}

impl LedgerReport {
    /// The maximum number of operations reported for each rank.
    pub const PER_RANK: usize = 4;

    pub(crate) fn new(ranks: impl Iterator<Item = (Option<Ledger>, Option<LongWait>)>) -> Self {
        let known = |(ledger, wait): (Option<Ledger>, _)| Known {
            is_here: ledger.is_some(),
            wait,
            entries: ledger.map_or_else(Vec::new, |ledger| ledger.last(Self::PER_RANK)),
        };
        Self(ranks.map(known).collect())
    }

    /// Returns the last operations of each rank, oldest first, by rank of the world. The list of a rank of another
    /// process is empty.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = &[LedgerEntry]> {
        self.0.iter().map(|known| known.entries.as_slice())
    }
}

/// Prints one operation per line, under `last operations:`.
impl fmt::Display for LedgerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("last operations:")?;
        for (rank, known) in self.0.iter().enumerate() {
            let Known {
                entries,
                is_here,
                wait,
            } = known;
            match (entries.is_empty(), is_here) {
                (true, true) => write!(f, "\n  rank {rank}: none")?,
                (true, false) => {
                    write!(f, "\n  rank {rank}: see the output of its process")?;
                    if let Some(wait) = wait {
                        write!(f, "; it {wait}")?;
                    }
                }
                (false, _) => {}
            }
            for entry in entries {
                write!(f, "\n  rank {rank}: {entry}")?;
            }
        }
        Ok(())
    }
}
