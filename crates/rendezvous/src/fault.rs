//! Failures on demand, to test the behaviour of programs when a rank fails.
//!
//! Only the feature `faults` makes them happen. Without it, no [`Fault`] can be created, so none is ignored.

use std::fmt;

/// A failure of one rank at one point of one step.
///
/// ```
/// use burn_fsdp_rendezvous::{At, Fault, How};
///
/// # #[cfg(feature = "faults")] {
/// let fault = Fault::parse("rank:1,step:3,at:backward,how:panic")?;
/// assert_eq!(fault, Fault::new(1, 3, At::Backward, How::Panic));
/// let flip = Fault::parse("rank:1,step:3,at:shard,how:flip,seed:5")?;
/// assert_eq!(flip, Fault::new(1, 3, At::Shard, How::Flip).seed(5));
/// # }
/// # Ok::<(), burn_fsdp_rendezvous::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The rank of the world that fails.
    pub rank: usize,
    /// The step, as passed to `ProcessGroup::begin_step`.
    pub step: u64,
    /// The point of the step where the fault triggers.
    pub at: At,
    /// How the rank fails.
    pub how: How,
    /// Selects the value and the bit that flip at the point; ignored for other failures.
    pub seed: u64,
}

/// The point of a step at which a fault triggers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum At {
    /// The fault point of the forward pass.
    Forward,
    /// The fault point of the backward pass.
    Backward,
    /// The start of the step's first collective operation. A flip changes a bit of the data that this rank contributes
    /// to an operation, after the rank has computed the data's checksum.
    Collective,
    /// A shard, or a parameter kept whole, between steps; only for flips.
    Shard,
    /// A full parameter that was gathered and is in use; only for flips.
    Weight,
    /// A gradient that was reduced and waits for the optimizer; only for flips.
    Gradient,
    /// A tensor of the optimizer state between steps; only for flips.
    State,
    /// A running state, such as BatchNorm's, between steps; only for flips.
    Running,
}

/// How a rank fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum How {
    /// The rank panics.
    Panic,
    /// The rank returns an [`Error::Injected`](crate::Error::Injected).
    Error,
    /// The rank stalls far beyond every deadline.
    Stall,
    /// One bit flips. At [`At::Collective`], the bit is in the data of one of the step's first operations to which the
    /// rank contributes data. At the other points, it is in one of the first values there. The rank continues. Use it
    /// to compare the behaviour with and without [`Check::Agreement`](crate::Check::Agreement). Not available at
    /// [`At::Forward`] and [`At::Backward`].
    Flip,
}

impl Fault {
    /// The syntax in which faults are parsed and printed.
    pub const SYNTAX: &str = "rank:N,step:N,at:forward|backward|collective,how:panic|error|stall, or \
         rank:N,step:N,at:collective|shard|weight|gradient|state|running,how:flip,seed:N";

    /// Creates a fault with seed 0.
    #[cfg(feature = "faults")]
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

    /// Sets the seed, which selects one of the first four values at the point and one of its bits.
    #[cfg(feature = "faults")]
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// Prints with the syntax [`Fault::SYNTAX`].
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
