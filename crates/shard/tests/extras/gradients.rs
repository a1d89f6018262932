//! Gradients by parameter and by unit; helpers for the other tests.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{Error, ShardPolicy, backward, gradients_by_unit, params_with_gradient};

use super::bench::{build, device, on_ranks, ready};
use super::nets::{MLP, Mlp};

/// A sharded module with the gradients of its first step on this rank.
pub(crate) fn one_step(
    world: &ProcessGroup,
    policy: ShardPolicy,
) -> Result<(Mlp, GradientsParams), Error> {
    let device = device();
    let model = build(MLP, world, &device, policy)?;
    let loss = (MLP.loss)(&model, world.rank(), 0, &device);
    let gradients = backward(loss, &model)?;
    Ok((model, gradients))
}

/// The values of all gradients by path, of sharded and of plain modules.
pub(crate) fn values<M: Module>(
    module: &M,
    gradients: &GradientsParams,
) -> Vec<(String, Vec<f32>)> {
    let mut read = Read {
        gradients,
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut read);
    read.found
}

struct Read<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for Read<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            let values = gradient.into_data().try_to_vec().expect("f32");
            self.found.push((self.path.join("."), values));
        }
    }
}

/// Sets the first element of the first shard's gradient.
pub(crate) fn spoil<M: Module>(module: &M, gradients: &mut GradientsParams, value: f32) {
    module.visit(&mut Spoil {
        gradients,
        value: Some(value),
    });
}

struct Spoil<'a> {
    gradients: &'a mut GradientsParams,
    value: Option<f32>,
}

impl ModuleVisitor for Spoil<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id)
            && let Some(value) = self.value.take()
        {
            let first = gradient.clone().slice(0..1).full_like(value);
            let spoilt = gradient.slice_assign(0..1, first);
            self.gradients.register(param.id, spoilt);
        }
    }
}

#[test]
fn each_parameter_with_a_gradient_is_listed_once_and_in_order() {
    for ranks in 1..=3 {
        for listed in on_ranks(ranks, |world| {
            let (model, gradients) = one_step(&world, ShardPolicy::new().units(["blocks.*"]))?;
            Ok(params_with_gradient(&model, &gradients))
        }) {
            let plain = ready(|| Mlp::new(&device()));
            let paths = super::bench::params(&plain).into_iter();
            let all: Vec<_> = paths.map(|(path, _)| path).collect();
            assert_eq!(listed, all);
        }
    }
}

#[test]
fn gradients_are_split_by_unit_without_loss() {
    on_ranks(2, |world| {
        let (model, gradients) = one_step(&world, ShardPolicy::new().units(["blocks.*"]))?;
        let before = values(&model, &gradients);
        let parts = gradients_by_unit(&model, gradients);
        let units: Vec<_> = parts.iter().map(|part| part.unit.as_str()).collect();
        assert_eq!(units, ["root", "blocks.0", "blocks.1", "blocks.2"]);
        let mut after = Vec::new();
        for part in &parts {
            after.extend(values(&model, &part.gradients));
        }
        after.sort_by(|one, other| one.0.cmp(&other.0));
        let mut before = before;
        before.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(after, before);
        Ok(())
    });
}
