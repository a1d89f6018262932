//! Failures on demand, to test how programs behave when a rank fails.

use std::fmt;

/// A failure that one rank is to have at one point of one step.
///
/// ```
/// use burn_fsdp_collectives::{At, Fault, How};
///
/// let fault = Fault::parse("rank:1,step:3,at:backward,how:panic")?;
/// assert_eq!(fault, Fault { rank: 1, step: 3, at: At::Backward, how: How::Panic });
/// # Ok::<(), burn_fsdp_collectives::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The rank of the world that fails.
    pub rank: usize,
    /// The step, as given to [`ProcessGroup::begin_step`](crate::ProcessGroup::begin_step).
    pub step: u64,
    /// The point of the step.
    pub at: At,
    /// The way in which the rank fails.
    pub how: How,
}

/// The point of a step at which a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum At {
    /// The fault point of the forward pass.
    Forward,
    /// The fault point of the backward pass.
    Backward,
    /// The start of the step's first collective operation.
    Collective,
}

/// The way in which a rank fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum How {
    /// A panic.
    Panic,
    /// An [`Error::Injected`](crate::Error::Injected).
    Error,
    /// A stall far beyond every deadline.
    Stall,
    /// One bit that changes, of what the rank gives in the step's first operation in which it gives anything. The rank
    /// goes on: what happens then shows what [`Check::Agreement`](crate::Check::Agreement) sees, and what happens
    /// without it. At [`At::Collective`] alone.
    Flip,
}

impl Fault {
    /// The syntax of a fault.
    pub const SYNTAX: &str =
        "rank:N,step:N,at:forward|backward|collective,how:panic|error|stall|flip";
}

impl Fault {
    /// Returns true if it changes what a rank gives, and fails nothing by itself.
    pub(crate) fn flips(&self) -> bool {
        self.how == How::Flip
    }
}

/// Prints as [`Fault::SYNTAX`] says.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            step,
            at,
            how,
        } = self;
        write!(f, "rank:{rank},step:{step},at:{at},how:{how}")
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Collective => "collective",
        })
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Panic => "panic",
            Self::Error => "error",
            Self::Stall => "stall",
            Self::Flip => "flip",
        })
    }
}
