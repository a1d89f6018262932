//! The common work of the legs of all engines: steps, an evaluation, a snapshot, and dying.

use burn_fsdp::internals::checkpoint::{LossScale, TrainingSnapshot};
use burn_fsdp::internals::testing::{At, Fault, How};
use burn_fsdp::{Error, ProcessGroup};

use super::legs::{Death, Place};

/// The last words of a rank.
pub(crate) const KILLED: &str = "killed on purpose";

/// One leg, on one rank. All ranks make the same calls.
pub(crate) trait Run {
    /// Makes a step, and returns this rank's loss.
    fn step(&mut self, step: usize, strike: &Strike) -> Result<f32, Error>;

    /// Returns the loss of the model in evaluation, on a batch that is the same on all ranks.
    fn evaluate(&mut self, end: usize) -> Result<f32, Error>;

    fn snapshot(&mut self) -> Result<TrainingSnapshot, Error>;

    fn loss_scale(&self) -> Option<LossScale>;
}

/// The fault that strikes this rank in a step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Strike {
    /// The layers before it dies in a forward.
    pub(crate) layers_left: Option<usize>,
    /// The fault of the first collective of backward.
    backward: Option<Fault>,
}

impl Strike {
    /// Prepares the death of a rank in a step, if it is to die there.
    pub(crate) fn new(death: Option<Death>, step: usize, world: &ProcessGroup) -> Self {
        let Some(death) = death else {
            return Self::default();
        };
        let how = if death.panics { How::Panic } else { How::Error };
        let rank = death.rank % world.size();
        let fault = Fault::new(rank, step as u64, At::Collective, how);
        let is_own = fault.rank == world.rank();
        match death.place {
            Place::Layer(layers) => Self {
                layers_left: is_own.then_some(layers),
                backward: None,
            },
            Place::Backward => Self {
                layers_left: None,
                backward: Some(fault),
            },
            Place::Collective => {
                arm(fault, world);
                Self::default()
            }
            Place::Storage(_) => Self::default(),
        }
    }

    /// Notes that backward begins.
    pub(crate) fn backward(&self, world: &ProcessGroup) {
        if let Some(fault) = self.backward {
            arm(fault, world);
        }
    }
}

fn arm(fault: Fault, world: &ProcessGroup) {
    world.set_fault(fault);
    world.begin_step(fault.step);
}
