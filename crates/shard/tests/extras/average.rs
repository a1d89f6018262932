//! Moving averages on shards, against a mapper over Burn's own module.

use std::collections::HashMap;

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use burn_fsdp_shard::{Error, ShardPolicy, Strategy, backward, moving_average};

use super::bench::{
    Outcome, SEED, assert_close, build, device, joined, on_ranks, optimizer, params, plain_device,
    seeded, whole_params,
};
use super::nets::{CONV_NET, ConvNet, MLP, Mlp};

const DECAY: f64 = 0.8;
const STEPS: usize = 4;

/// A mapper that averages with values by path.
struct Average {
    path: Vec<String>,
    values: HashMap<String, Vec<f32>>,
}

impl ModuleMapper for Average {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(values) = self.values.remove(&self.path.join(".")) else {
            return param;
        };
        param.map(|old| {
            let data = TensorData::new(values, old.shape());
            let new = Tensor::from_data(data, &old.device().without_autodiff());
            let average = old.inner().mul_scalar(DECAY) + new.mul_scalar(1.0 - DECAY);
            average.autodiff().require_grad()
        })
    }
}

/// The average of Burn's own module after each of its steps.
fn plainly(ranks: usize) -> Outcome {
    let device = plain_device().autodiff();
    let mut model = seeded(Mlp::new(&device), SEED);
    params(&model);
    let mut average = model.clone();
    let mut optim = optimizer();
    for step in 0..STEPS {
        let parts = (0..ranks).map(|rank| model.loss(rank, step, &device));
        let sum = parts.reduce(|sum, part| sum + part).expect("a rank");
        let gradients = sum.div_scalar(ranks as f32).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optim.step(1e-2, model, gradients);
        average = average.map(&mut Average {
            path: Vec::new(),
            values: params(&model).into_iter().collect(),
        });
    }
    Outcome {
        losses: vec![average.loss(0, 0, &device).into_scalar()],
        params: params(&average),
    }
}

#[test]
fn shards_are_averaged_as_the_whole_would_be() {
    let blocks = || ShardPolicy::new().units(["blocks.*"]);
    for ranks in 1..=4 {
        let want = plainly(ranks);
        let tolerance = if ranks == 1 { 0.0 } else { 1e-5 };
        for policy in [
            blocks(),
            blocks().strategy(Strategy::NoShard),
            blocks().one_owner(["blocks"]),
        ] {
            let got = on_ranks(ranks, move |world| {
                let mut model = build(MLP, &world, &device(), policy.clone())?;
                let mut average = model.clone();
                let mut optim = optimizer();
                for step in 0..STEPS {
                    let loss = model.loss(world.rank(), step, &device());
                    let gradients = backward(loss, &model)?;
                    model = optim.step(1e-2, model, gradients);
                    let before = world.counts();
                    average = moving_average(average, &model, DECAY)?;
                    assert_eq!(world.counts().since(&before).total().operations, 0);
                }
                // Evaluated, and the model trains on beside it.
                let loss = average.valid().loss(0, 0, &plain_device());
                let gradients = backward(model.loss(world.rank(), STEPS, &device()), &model)?;
                drop(optim.step(1e-2, model, gradients));
                Ok(Outcome {
                    losses: vec![loss.into_scalar()],
                    params: whole_params(Mlp::new(&device()), &average),
                })
            });
            assert_close(&joined(&got), &want, tolerance);
        }
    }
}

/// Running states are averaged, and the factors of adapters; what is no copy is refused.
#[test]
fn a_copy_of_the_model_is_averaged_and_nothing_else() {
    on_ranks(2, |world| {
        let model = build(CONV_NET, &world, &device(), ShardPolicy::new())?;
        let average = model.clone();
        let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
        let model = optimizer().step(1e-2, model, gradients);
        let running = |model: &ConvNet| {
            let mean = model.norms[0].running_mean.value();
            mean.into_data().try_to_vec::<f32>().expect("floats")
        };
        let (before, after) = (running(&average.valid()), running(&model.valid()));
        let average = moving_average(average, &model, 0.5)?;
        for ((got, before), after) in running(&average).iter().zip(before).zip(&after) {
            assert!((got - (before + after) / 2.0).abs() < 1e-6);
        }
        let other = build(
            CONV_NET,
            &world,
            &device(),
            ShardPolicy::new().whole_below(1000),
        )?;
        let refused = moving_average(other, &model, 0.5).expect_err("cut otherwise");
        assert!(matches!(refused, Error::Returned { .. }), "{refused}");
        for decay in [-0.1, 1.5, f64::NAN] {
            let refused = moving_average(average.clone(), &model, decay).expect_err("no share");
            assert!(refused.to_string().contains("decay"), "{refused}");
        }
        let adapted = ShardPolicy::new().lora(Lora::new(2, 2.0));
        let model = build(MLP, &world, &device(), adapted)?;
        let average = model.clone();
        let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
        let model = optimizer().step(1e-2, model, gradients);
        let average = moving_average(average, &model, 0.0)?;
        let loss = |model: &Mlp| {
            model
                .valid()
                .loss(0, 0, &plain_device())
                .into_scalar::<f32>()
        };
        assert_eq!(loss(&average), loss(&model));
        Ok(())
    });
}
