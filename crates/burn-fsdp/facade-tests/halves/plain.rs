//! The oracle: Burn's loop on one rank, with 32-bit masters that are cast for each forward.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, Optimizer, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::nets::{By, Kind, Net, batch};

pub(crate) const RATE: f64 = 0.5;
pub(crate) const STEPS: usize = 3;

/// The loss of a step and the tensors after it, by path. With such an optimizer their changes are the gradients.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Step {
    pub(crate) loss: f32,
    pub(crate) tensors: BTreeMap<String, Vec<f32>>,
}

pub(crate) fn sgd() -> impl Optimizer {
    SgdConfig::new().build()
}

/// Trains in a type on the batches of `ranks` ranks. Running states come from the batch of rank 0.
pub(crate) fn plainly(kind: Kind, compute: FloatDType, ranks: usize) -> Vec<Step> {
    let device = Device::flex().autodiff();
    let mut model = Net::new(kind, &device);
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut steps = Vec::new();
    for step in 0..STEPS {
        let mut loss = 0.0;
        let mut parts = Vec::new();
        let mut running = BTreeMap::new();
        for rank in 0..ranks {
            let mut cast = Casts {
                compute,
                field: String::new(),
            };
            let cast = model.clone().map(&mut cast);
            let x = batch(step, rank, &device).cast(compute);
            let of_rank = cast.loss(x, By::Hand);
            loss += of_rank.clone().into_scalar::<f32>() / ranks as f32;
            parts.push(GradientsParams::from_grads(of_rank.backward(), &model));
            if rank == 0 {
                drop(cast.valid());
                running = tensors(&cast);
                running.retain(|path, _| path.contains("running_"));
            }
        }
        let mean = mean(&model, &parts);
        model = optimizer.step(RATE, model, mean);
        let mut tensors = tensors(&model);
        tensors.extend(running);
        steps.push(Step { loss, tensors });
    }
    steps
}

/// Returns all float tensors of a module.
pub(crate) fn tensors<M: Module>(module: &M) -> BTreeMap<String, Vec<f32>> {
    #[derive(Default)]
    struct Reader(Vec<String>, BTreeMap<String, Vec<f32>>);
    impl ModuleVisitor for Reader {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().convert::<f32>();
            let values = values.try_to_vec().expect("converted");
            self.1.insert(self.0.join("."), values);
        }
    }
    let mut reader = Reader::default();
    module.visit(&mut reader);
    reader.1
}

/// Casts every parameter, so that gradients come back to the original.
struct Casts {
    compute: FloatDType,
    field: String,
}

impl ModuleMapper for Casts {
    fn enter_module(&mut self, name: &str, _: &str) {
        name.clone_into(&mut self.field);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.field.starts_with("running_") {
            param
        } else {
            Param::initialized(param.id, param.val().cast(self.compute))
        }
    }
}

/// The mean of the gradients of all parts.
struct Mean<'a> {
    parts: &'a [GradientsParams],
    mean: GradientsParams,
}

impl ModuleVisitor for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let of_parts = self.parts.iter();
        let sum = of_parts.filter_map(|part| part.get::<D>(param.id));
        let sum = sum.map(|part| match part.dtype() {
            DType::F64 => part,
            _ => part.cast(DType::F32),
        });
        if let Some(sum) = sum.reduce(|sum, part| sum + part) {
            let mean = sum.mul_scalar(1.0 / self.parts.len() as f64);
            self.mean.register(param.id, mean.cast(param.val().dtype()));
        }
    }
}

/// Returns the mean of the gradients of a model's parts of a batch.
pub(crate) fn mean(model: &Net, parts: &[GradientsParams]) -> GradientsParams {
    let mut mean = Mean {
        parts,
        mean: GradientsParams::new(),
    };
    model.visit(&mut mean);
    mean.mean
}

/// Returns a model whose parameters are kept in a different type.
pub(crate) fn kept_in(model: Net, stored: FloatDType) -> Net {
    struct Kept(FloatDType);
    impl ModuleMapper for Kept {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let old = param.val();
            let value = Tensor::<D>::from_data(old.to_data(), (&old.device(), self.0.into()));
            Param::initialized(param.id, value.require_grad())
        }
    }
    model.map(&mut Kept(stored))
}
