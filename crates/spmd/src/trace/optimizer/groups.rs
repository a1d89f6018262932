//! The optimizers of a step: one for all parameters, and others for groups of them.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use burn::module::{ParamGroup, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{ModuleOptimizer, Optimizer};
use burn::tensor::DType;

use super::twin::{Twin, TwinOf};
use crate::error::Error;
use crate::panics::caught;

/// Calls `$body` with the const generic `$d` equal to `$rank`.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr, $otherwise:expr) => {
        match $rank {
            1 => {
                const $d: usize = 1;
                $body
            }
            2 => {
                const $d: usize = 2;
                $body
            }
            3 => {
                const $d: usize = 3;
                $body
            }
            4 => {
                const $d: usize = 4;
                $body
            }
            5 => {
                const $d: usize = 5;
                $body
            }
            6 => {
                const $d: usize = 6;
                $body
            }
            _ => $otherwise,
        }
    };
}

/// The optimizers of a compiled step: one for all parameters, and others for groups of them, as in Burn's
/// [`ModuleOptimizer`]. A single Burn optimizer also converts to this type.
///
/// A parameter in several groups is updated by the optimizer that was added last. Groups have their own rates if a step
/// is called with group rates. Burn's `ModuleLrScheduler` has a schedule for each group.
///
/// ```
/// use burn::module::ParamGroup;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::{AdamWConfig, ModuleOptimizer};
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::{Mode, OptimizerGroups, compile};
///
/// let decayed = AdamWConfig::new().with_weight_decay(0.1).build();
/// let others = AdamWConfig::new().with_weight_decay(0.0).build();
/// let groups = OptimizerGroups::from(decayed).with_group(ParamGroup::from_predicate("bias"), others);
/// let mut step = compile(
///     |device: &Device| LinearConfig::new(3, 1).init(device),
///     |model: &Linear, x: Tensor<2>| model.forward(x).square().mean(),
///     groups.clone(),
///     Mode::single(),
/// )?;
/// step.step(1e-2, &Tensor::ones([8, 3], &Device::flex()))?;
/// // The same optimizers, for the eager engine and for Burn's own loop.
/// let optimizer = ModuleOptimizer::from(groups);
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
#[derive(Clone)]
pub struct OptimizerGroups {
    /// The first group covers all parameters.
    groups: Vec<Group>,
}

#[derive(Clone)]
struct Group {
    members: ParamGroup,
    optimizer: Arc<dyn Followed>,
}

impl OptimizerGroups {
    /// Adds an optimizer for the parameters of a group.
    ///
    /// Select the parameters by path: ids refer to the module that `init` of [`compile`](crate::compile()) returns, and
    /// every new module has new ids. A group without any parameter is rejected when the step is compiled.
    #[must_use]
    pub fn with_group(mut self, members: ParamGroup, optimizer: impl Optimizer) -> Self {
        let optimizer = Arc::new(optimizer);
        self.groups.push(Group { members, optimizer });
        self
    }

    /// Returns the index of a parameter's optimizer.
    pub(crate) fn of(&self, id: ParamId, path: &str) -> usize {
        let mut groups = self.groups.iter();
        let found = groups.rposition(|group| group.members.matches(&id, Some(path)));
        found.unwrap_or(0)
    }

    /// Returns the type name of the optimizer with this index.
    pub(super) fn name(&self, group: usize) -> &'static str {
        self.groups[group].optimizer.name()
    }

    /// Creates the twin of the optimizer with this index, for parameters of one shape and type.
    pub(super) fn twin(
        &self,
        group: usize,
        learning_rate: f64,
        (shape, dtype): (&[usize], DType),
    ) -> Result<Box<dyn Twin>, String> {
        let optimizer = &self.groups[group].optimizer;
        optimizer.twin(learning_rate, shape, dtype)
    }

    /// Rejects a group without any parameter.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownName`].
    pub(crate) fn check_members<'a>(
        &self,
        parameters: impl Iterator<Item = (ParamId, &'a str)> + Clone,
    ) -> Result<(), Error> {
        let is_empty = |group: &&Group| {
            let mut parameters = parameters.clone();
            !parameters.any(|(id, path)| group.members.matches(&id, Some(path)))
        };
        let known = || parameters.clone().take(8).map(|(_, path)| path);
        match self.groups.iter().skip(1).find(is_empty) {
            None => Ok(()),
            Some(group) => Err(Error::UnknownName {
                what: "parameter in the group of an optimizer",
                name: format!("{:?}", group.members),
                known: known().collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

impl<O: Optimizer> From<O> for OptimizerGroups {
    fn from(optimizer: O) -> Self {
        let all = Group {
            members: ParamGroup::all(),
            optimizer: Arc::new(optimizer),
        };
        Self { groups: vec![all] }
    }
}

impl From<OptimizerGroups> for ModuleOptimizer {
    /// Converts the groups to Burn's optimizer, for Burn's own loop and for the eager engine.
    fn from(groups: OptimizerGroups) -> Self {
        let mut groups = groups.groups.into_iter();
        let all = groups.next().expect("the first is for all parameters");
        groups.fold(all.optimizer.alone(), |all, group| {
            group.optimizer.added_to(all, group.members)
        })
    }
}

impl fmt::Debug for OptimizerGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = self.groups.iter();
        let groups = groups.map(|group| (&group.members, group.optimizer.name()));
        f.debug_list().entries(groups).finish()
    }
}

/// An optimizer of any type.
trait Followed: Send + Sync {
    fn name(&self) -> &'static str;

    fn twin(
        &self,
        learning_rate: f64,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Box<dyn Twin>, String>;

    /// Converts it to Burn's optimizer for all parameters.
    fn alone(&self) -> ModuleOptimizer;

    /// Adds it to Burn's optimizer `all`, for the members of a group.
    fn added_to(&self, all: ModuleOptimizer, members: ParamGroup) -> ModuleOptimizer;
}

impl<O: Optimizer> Followed for O {
    fn name(&self) -> &'static str {
        type_name::<O>()
    }

    fn twin(
        &self,
        learning_rate: f64,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Box<dyn Twin>, String> {
        with_rank!(
            shape.len(),
            D => Ok(Box::new(TwinOf::<O, D>::new(self, learning_rate, shape, dtype)?)),
            Err(format!("its tensor has {} dims, but only 1 to 6 are supported", shape.len()))
        )
    }

    fn alone(&self) -> ModuleOptimizer {
        ModuleOptimizer::from(self.clone())
    }

    fn added_to(&self, all: ModuleOptimizer, members: ParamGroup) -> ModuleOptimizer {
        all.with_group(members, self.clone(), None)
    }
}

/// Returns the learning rate of the parameters that are in no group; `None` if there are no rates.
pub(crate) fn base_rate(rates: &ModuleLearningRate) -> Option<f64> {
    caught(|| rates.base()).ok()
}
