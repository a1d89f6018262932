//! Failures on demand, to test how programs behave when a rank fails.

use std::fmt;

/// A failure that one rank is to have at one point of one step.
///
/// ```
/// use burn_fsdp_collectives::{At, Fault, How};
///
/// let fault = Fault::parse("rank:1,step:3,at:backward,how:panic")?;
/// assert_eq!(fault, Fault::new(1, 3, At::Backward, How::Panic));
/// let flip = Fault::parse("rank:1,step:3,at:shard,how:flip,seed:5")?;
/// assert_eq!(flip, Fault::new(1, 3, At::Shard, How::Flip).seed(5));
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
    /// The choice of the value and the bit that flip, of those at the point; of no meaning for other failures.
    pub seed: u64,
}

/// The point of a step at which a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum At {
    /// The fault point of the forward pass.
    Forward,
    /// The fault point of the backward pass.
    Backward,
    /// The start of the step's first collective operation. A bit flips in the buffer of an operation, after this rank
    /// has told of it.
    Collective,
    /// A shard, or a parameter kept whole, that lies between steps: a flip alone.
    Shard,
    /// A full parameter that was gathered and is in use: a flip alone.
    Weight,
    /// A gradient that was reduced and waits for the optimizer: a flip alone.
    Gradient,
    /// A state of the optimizer that lies between steps: a flip alone.
    State,
    /// A running state, such as BatchNorm's, that lies between steps: a flip alone.
    Running,
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
    /// One bit that changes: of what the rank gives in one of the step's first operations in which it gives anything, or
    /// of one of the first values that lie at the point. The rank goes on: what happens then shows what
    /// [`Check::Agreement`](crate::Check::Agreement) sees, and what happens without it. Not at [`At::Forward`] and
    /// [`At::Backward`].
    Flip,
}

impl Fault {
    /// The syntax of a fault.
    pub const SYNTAX: &str = "rank:N,step:N,at:forward|backward|collective,how:panic|error|stall, or \
         rank:N,step:N,at:collective|shard|weight|gradient|state|running,how:flip,seed:N";

    /// The most values that a flip passes by before it strikes.
    const MOST_PASSED: u64 = 4;

    /// Returns the failure of a rank of the world at a point of a step, with the seed 0.
    pub fn new(rank: usize, step: u64, at: At, how: How) -> Self {
        let seed = 0;
        Self {
            rank,
            step,
            at,
            how,
            seed,
        }
    }

    /// Returns it with another choice of what flips: of the first four values at the point, and of the bits of that one.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

impl Fault {
    /// Returns true if it changes what a rank gives, and fails nothing by itself.
    pub(crate) fn flips(&self) -> bool {
        self.how == How::Flip
    }

    /// Returns the number of values that it passes by before it strikes.
    pub(crate) fn places_passed(&self) -> u64 {
        self.seed % Self::MOST_PASSED
    }

    /// Returns the bit that flips in so many bytes, at least one: with the seed 0 the first of the byte in the middle.
    pub(crate) fn bit(&self, num_bytes: usize) -> usize {
        // Odd, so that all bits of the seed count.
        let mixed = (self.seed / Self::MOST_PASSED).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let byte = (num_bytes / 2 + (mixed >> 8) as usize % num_bytes) % num_bytes;
        8 * byte + (mixed >> 4) as usize % 8
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
            seed,
        } = self;
        write!(f, "rank:{rank},step:{step},at:{at},how:{how}")?;
        match seed {
            0 => Ok(()),
            seed => write!(f, ",seed:{seed}"),
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Collective => "collective",
            Self::Shard => "shard",
            Self::Weight => "weight",
            Self::Gradient => "gradient",
            Self::State => "state",
            Self::Running => "running",
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
