//! The check that processes, each of which sets up the training itself, use the same settings.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::{Bool, Int, Shape, Tensor};
use burn::train::LearnerModel;
use burn_fsdp_collectives::{Fingerprint, ProcessGroup};
use burn_fsdp_shard::local_ids;

use crate::course::Course;
use crate::notes::exchanged;
use burn_fsdp_glue::error::Error;

/// Checks that all ranks have set up the same training. `more` names the engine's own settings, with their fingerprints.
///
/// The values of the model and of the optimizer's state need not agree: all ranks get rank 0's.
///
/// Collective.
pub(crate) fn check_same<M: LearnerModel>(
    world: &ProcessGroup,
    course: &Course<M>,
    model: &M,
    more: &[(&'static str, u64)],
) -> Result<(), Error> {
    let text = |what: &dyn std::fmt::Debug| Fingerprint::of(&format!("{what:?}"));
    let mut own = vec![
        ("the epochs", text(&course.epochs)),
        ("the accumulation", text(&course.accumulation)),
        ("whether epochs are saved", text(&course.saves)),
        ("the number of items", text(&course.items)),
        (
            "the number of validated items",
            text(&course.validated_items),
        ),
        ("the replicas", text(&course.settings.replicas)),
        ("the clipping", text(&course.settings.clip)),
        ("the loss scaler", text(&course.settings.scaler)),
        ("the model's tensors", of_tensors(model)),
    ];
    own.extend(more);
    let sums: Vec<u64> = own.iter().map(|(_, sum)| *sum).collect();
    let all: Vec<Vec<u64>> = exchanged(world, "agreement on a training", &sums)?;
    for (index, (what, sum)) in own.into_iter().enumerate() {
        let other = all.iter().position(|of| of.get(index) != Some(&sum));
        if let Some(rank) = other {
            return Err(Error::OtherTraining { what, rank });
        }
    }
    Ok(())
}

/// Returns the fingerprint of a model's tensors: paths, kinds and shapes. Lazy parameters stay uninitialized.
fn of_tensors<M: Module>(model: &M) -> u64 {
    let mut tensors = Tensors::default();
    model.visit(&mut tensors);
    Fingerprint::of(&tensors.found)
}

#[derive(Default)]
struct Tensors {
    path: Vec<String>,
    /// Path, kind and shape of each tensor.
    found: Vec<(String, char, Vec<usize>)>,
}

impl Tensors {
    fn add(&mut self, kind: char, shape: &Shape) {
        self.found.push((self.path.join("."), kind, shape.to_vec()));
    }
}

impl ModuleVisitor for Tensors {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add('f', &param.lazy_shape());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add('i', &param.lazy_shape());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add('b', &param.lazy_shape());
    }
}

/// The parameters whose learning rates are compared.
pub(crate) struct Rates(Vec<(ParamId, String)>);

impl Rates {
    pub(crate) fn of<M: Module>(model: &M) -> Result<Self, Error> {
        let ids = local_ids(model)?.into_iter();
        Ok(Self(ids.map(|ids| (ids.id, ids.path)).collect()))
    }

    /// Returns the fingerprint of the rates of all parameters, which are 0 before the first step.
    pub(crate) fn fingerprint(&self, rates: &ModuleLearningRate) -> u64 {
        let of = |(id, path): &(ParamId, String)| rates.lr_from_param(*id, Some(path)).to_bits();
        Fingerprint::of(&self.0.iter().map(of).collect::<Vec<_>>())
    }
}
