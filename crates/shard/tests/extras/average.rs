//! Moving averages on shards, compared with a mapper over Burn's own module.

use std::collections::HashMap;

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, fully_shard, load_local_state, local_state,
    moving_average,
};

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
                // It is evaluated, and the training of the model continues.
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

/// Running states and the factors of adapters are averaged; a module that is not a copy is rejected.
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

/// A mapper that changes the type of every float tensor.
struct Of(DType);

impl ModuleMapper for Of {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

/// A layer and its bias, of this type.
fn layer(dtype: DType) -> Linear {
    let weight = |i: usize| (i * 37 % 101) as f32 / 90.0 - 0.5;
    let values: Vec<f32> = (0..5 * 7).map(weight).collect();
    let mut layer = LinearConfig::new(5, 7).init(&device());
    layer.weight = Param::from_data(TensorData::new(values, [5, 7]), &device());
    layer.map(&mut Of(dtype))
}

/// The elements that this rank holds, in 32 bits.
fn held(module: &Linear) -> Result<Vec<f32>, Error> {
    let elements = local_state(module)?.into_iter().map(|tensor| {
        let bytes = tensor.elements.as_bytes().to_vec();
        let len = bytes.len() / tensor.dtype.size();
        let data = TensorData::from_bytes_vec(bytes, [len], tensor.dtype);
        data.convert::<f32>().try_to_vec::<f32>().expect("floats")
    });
    Ok(elements.flatten().collect())
}

fn distance(one: &[f32], other: &[f32]) -> f64 {
    let squares = one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2));
    squares.sum::<f64>().sqrt()
}

/// One step further than the model that an average was cloned from.
fn stepped(model: Linear, dtype: DType) -> Result<Linear, Error> {
    let x = Tensor::<2>::ones([3, 5], &device()).cast(dtype);
    let gradients = backward(model.forward(x).square().sum(), &model)?;
    Ok(SgdConfig::new().init().step(0.05, model, gradients))
}

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// 0.999^2000 = 0.135 of the distance is left.
#[test]
fn an_average_moves_in_every_type() {
    let policies = [
        ShardPolicy::new(),
        ShardPolicy::new().strategy(Strategy::NoShard),
        ShardPolicy::new().whole_below(1000),
    ];
    for dtype in TYPES {
        for (ranks, policy) in [1, 2, 3].into_iter().zip(policies.clone()) {
            let left = on_ranks(ranks, move |world| {
                let model = fully_shard(layer(dtype), &world, policy.clone())?;
                let mut average = model.clone();
                let model = stepped(model, dtype)?;
                let before = distance(&held(&average)?, &held(&model)?);
                for step in 0..2000 {
                    average = moving_average(average, &model, 0.999)?;
                    if step == 1000 {
                        // Copies and evaluation leave it unchanged.
                        let x = Tensor::<2>::ones([1, 5], &plain_device()).cast(dtype);
                        drop(average.valid().forward(x));
                        average = average.clone().train();
                    }
                }
                let after = distance(&held(&average)?, &held(&model)?);
                // There is nothing where another rank owns everything.
                Ok(if before > 0.0 { after / before } else { 0.135 })
            });
            for left in left {
                assert!((left - 0.135).abs() < 0.02, "{dtype:?} on {ranks}: {left}");
            }
        }
    }
}

/// An f32 average of a 16-bit model equals the average of the model's values in f32, to the bit.
#[test]
fn averages_can_be_wider_than_their_model() {
    for dtype in [DType::BF16, DType::F16] {
        on_ranks(2, move |world| {
            let policy = ShardPolicy::new;
            let wide = layer(dtype).map(&mut Of(DType::F32));
            let mut average = fully_shard(wide, &world, policy())?;
            let model = fully_shard(layer(dtype), &world, policy())?;
            let mut want = held(&average)?;
            let model = stepped(model, dtype)?;
            let new = held(&model)?;
            for _ in 0..5 {
                average = moving_average(average, &model, 0.875)?;
                let sums = want.iter_mut().zip(&new);
                sums.for_each(|(old, new)| *old = *old * 0.875 + new * 0.125);
            }
            assert_eq!(held(&average)?, want);
            let refused = moving_average(model, &average, 0.5).expect_err("fewer bits");
            assert!(matches!(refused, Error::Returned { .. }), "{refused}");
            Ok(())
        });
    }
}

/// A sum in 32 bits belongs to the values that it was computed from: other values start again.
#[test]
fn changed_values_restart_the_average() {
    on_ranks(2, |world| {
        let dtype = DType::BF16;
        let model = fully_shard(layer(dtype), &world, ShardPolicy::new())?;
        let mut average = model.clone();
        let model = stepped(model, dtype)?;
        for _ in 0..10 {
            average = moving_average(average, &model, 0.999)?;
        }
        let moved = load_local_state::<_, Error>(average, |tensor| {
            Ok(Some(vec![0; tensor.elements.len()]))
        })?;
        let average = moving_average(moved, &model, 0.5)?;
        let half: Vec<f32> = held(&model)?.iter().map(|value| value / 2.0).collect();
        assert_eq!(held(&average)?, half);
        Ok(())
    });
}

/// Tensors that no unit manages have no place for more bits.
#[test]
fn unmanaged_16_bit_tensors_are_named_in_the_error() {
    on_ranks(2, |world| {
        let policy = ShardPolicy::new().units(["blocks.*"]).ignore(["head"]);
        let net = Mlp::new(&device()).map(&mut Of(DType::BF16));
        let model = fully_shard(net, &world, policy)?;
        let refused = moving_average(model.clone(), &model, 0.9).expect_err("it never moves");
        let text = refused.to_string();
        assert!(text.contains("`head.") && text.contains("BF16"), "{text}");
        Ok(())
    });
}

/// The policy casts running states after the module was built.
#[test]
fn cast_running_states_are_named_in_the_error() {
    on_ranks(2, |world| {
        let policy = ShardPolicy::new().buffer_type(FloatDType::BF16);
        let model = build(CONV_NET, &world, &device(), policy)?;
        match moving_average(model.clone(), &model, DECAY) {
            Err(Error::Average { path, dtype }) => {
                assert!(path.ends_with("running_mean"), "{path}");
                assert_eq!(dtype, DType::BF16);
            }
            other => panic!("averaged in 16 bits: {:?}", other.err()),
        }
        Ok(())
    });
}
