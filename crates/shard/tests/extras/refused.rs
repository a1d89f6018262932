//! Unsupported cases are named in errors, and supported ones work.

use burn::module::{Devices, Lora, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, MuonConfig};
use burn::tensor::{Device, FloatDType, GradientCheckpointingStrategy, Tensor, TensorData};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, Norm, Precision, ShardPolicy, Strategy, backward, check_elementwise,
    check_elementwise_once, fully_shard, grad_norm, params_with_gradient, units,
};

use super::bench::{build, device, on_ranks, ready};
use super::nets::{ConvNet, MLP, Mlp};

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

/// Two layers without names, written by hand.
#[derive(Debug, Clone)]
struct Nameless(Linear, Linear);

impl Module for Nameless {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device), self.1.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device), self.1.to_device(device))
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
        self.1.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        Self(self.0.map(mapper), self.1.map(mapper))
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        Self(self.0.valid(), self.1.valid())
    }

    fn train(self) -> Self {
        Self(self.0.train(), self.1.train())
    }
}

#[test]
fn two_parameters_under_one_path_are_named() {
    on_ranks(1, |world| {
        let layer = || LinearConfig::new(4, 4).init(&device());
        let model = ready(|| Nameless(layer(), layer()));
        let error = fully_shard(model, &line(&world)?, ShardPolicy::new()).expect_err("one path");
        assert!(matches!(error, Error::SamePath { .. }), "{error}");
        assert!(error.to_string().contains("`weight`"), "{error}");
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Sparse {
    nothing: Param<Tensor<2>>,
    flat: Param<Tensor<1>>,
    layer: Linear,
}

#[test]
fn empty_parameters_are_ignored() {
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        on_ranks(2, move |world| {
            let device = device();
            let model = ready(|| Sparse {
                nothing: Param::from_tensor(Tensor::zeros([0, 3], &device)),
                flat: Param::from_tensor(Tensor::zeros([0], &device)),
                layer: LinearConfig::new(4, 4).init(&device),
            });
            let policy = ShardPolicy::new().strategy(strategy);
            let model = fully_shard(model, &line(&world)?, policy)?;
            let x = Tensor::<2>::ones([2, 4], &device);
            let loss = model.layer.forward(x).sum() + model.nothing.val().sum();
            let gradients = backward(loss, &model)?;
            let model = AdamWConfig::new().init().step(1e-3, model, gradients);
            let record = model.clone().into_record();
            assert_eq!(record.len(), 4);
            assert_eq!(model.load_record(record).nothing.dims(), [0, 3]);
            Ok(())
        });
    }
}

#[test]
fn a_pattern_of_full_in_without_a_module_is_named() {
    on_ranks(1, |world| {
        let blocks = || ShardPolicy::new().units(["blocks.*"]);
        let precision = |pattern: &str| Precision::new(FloatDType::BF16).full_in([pattern]);
        let model = ready(|| Mlp::new(&device()));
        let policy = blocks().precision(precision("blocks.*.nrom"));
        let error = fully_shard(model, &line(&world)?, policy).expect_err("a typo");
        assert!(matches!(error, Error::UnmatchedPattern { .. }), "{error}");
        assert!(error.to_string().contains("`blocks.*.nrom`"), "{error}");
        build(
            MLP,
            &world,
            &device(),
            blocks().precision(precision("**.norm")),
        )?;
        Ok(())
    });
}

#[test]
fn patterns_name_parts_of_segments_and_any_segments() {
    let names = |pattern: &'static str| {
        on_ranks(1, move |world| {
            let model = ready(|| ConvNet::new(&device()));
            let policy = ShardPolicy::new().units([pattern]);
            let model = fully_shard(model, &line(&world)?, policy)?;
            Ok(units(&model)?
                .iter()
                .map(|unit| unit.name())
                .collect::<Vec<_>>())
        })
        .swap_remove(0)
    };
    assert_eq!(names("**.0"), ["convs.0", "root", "norms.0"]);
    assert_eq!(names("hea*"), ["root", "head"]);
}

#[test]
fn an_unknown_axis_is_named_with_a_remedy() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("data", 1)?)?;
        let model = ready(|| Mlp::new(&device()));
        let error = fully_shard(model, &mesh, ShardPolicy::new()).expect_err("another axis");
        let message = error.to_string();
        assert!(message.contains("no axis `shard`"), "{message}");
        assert!(message.contains("`data`"), "{message}");
        assert!(message.contains("`ShardPolicy::axis`"), "{message}");
        let model = ready(|| Mlp::new(&device()));
        fully_shard(model, &mesh, ShardPolicy::new().axis("data"))?;
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

/// Groups with the same name and size, but with different ranks.
#[test]
fn norms_over_two_groups_of_one_name() {
    let norms = on_ranks(4, |world| {
        let device = device();
        let one = ProcessMesh::new(&world, Mesh::new([("replicate", 2), ("shard", 2)])?)?;
        let two = ProcessMesh::new(&world, Mesh::new([("shard", 2), ("replicate", 2)])?)?;
        let layer = || LinearConfig::new(4, 4).with_bias(false).init(&device);
        let mut model = ready(|| Pair {
            first: layer(),
            second: layer(),
        });
        let policy = ShardPolicy::new().replicate_axis("replicate");
        model.first = fully_shard(model.first, &one, policy.clone())?;
        model.second = fully_shard(model.second, &two, policy)?;
        let x: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let x = Tensor::<2>::from_data(TensorData::new(x, [2, 4]), &device);
        let loss = model.first.forward(x.clone()).sum() + model.second.forward(x).sum();
        let gradients = backward(loss, &model)?;
        grad_norm(&model, &gradients, Norm::default())
    });
    // Each gradient has the column sums of x, 4, 6, 8 and 10, in four columns.
    let want = (2.0 * 4.0 * (16.0 + 36.0 + 64.0 + 100.0f64)).sqrt();
    for norm in norms {
        assert!((norm - want).abs() < 1e-3, "{norm}, {want}");
    }
}

struct ToHalf;

impl ModuleMapper for ToHalf {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            tensor
                .inner()
                .cast(FloatDType::BF16)
                .autodiff()
                .with_gradient_checkpointing_strategy(GradientCheckpointingStrategy::Balanced)
                .require_grad()
        })
    }
}

#[test]
fn optimizers_are_tried_in_the_parameters_type() {
    on_ranks(2, |world| {
        let layer = ready(|| LinearConfig::new(8, 8).with_bias(false).init(&device()));
        let layer: Linear = layer.map(&mut ToHalf);
        let layer = fully_shard(layer, &line(&world)?, ShardPolicy::new())?;
        let muon = MuonConfig::new().init();
        let error = check_elementwise(&layer, &muon).expect_err("Muon");
        assert!(matches!(error, Error::WholeTensors { .. }), "{error}");
        check_elementwise_once(&layer, &muon).expect_err("not tried with success yet");
        check_elementwise(&layer, &AdamWConfig::new().init())?;
        check_elementwise_once(&layer, &AdamWConfig::new().init())?;
        check_elementwise_once(&layer, &muon)
    });
}

/// Also if one of the two was sharded earlier, or is ignored.
#[test]
fn a_tied_parameter_is_rejected_everywhere() {
    on_ranks(1, |world| {
        let tied = || {
            let first: Linear = ready(|| LinearConfig::new(4, 4).init(&device()));
            Pair {
                second: first.clone(),
                first,
            }
        };
        let ignored = ShardPolicy::new().ignore(["second"]);
        let error = fully_shard(tied(), &line(&world)?, ignored).expect_err("tied");
        assert!(matches!(error, Error::Tied { .. }), "{error}");
        let mut model = tied();
        model.first = fully_shard(model.first, &line(&world)?, ShardPolicy::new())?;
        let error = fully_shard(model, &line(&world)?, ShardPolicy::new()).expect_err("tied");
        let message = error.to_string();
        assert!(
            message.contains("`first.weight` and `second.weight`"),
            "{message}"
        );
        Ok(())
    });
}

/// Burn freezes everything in a module that adapters are applied to; sharded parameters accept none.
#[test]
fn a_module_without_trained_parameters_is_named() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, ShardPolicy::new().units(["blocks.*"]))?;
        let adapted = model.clone().apply_lora(Lora::new(2, 4.0));
        assert!(adapted.blocks[0].up.weight.adapter().is_none());
        for model in [adapted, model.clone().freeze()] {
            let loss = model.loss(world.rank(), 0, &device);
            let error = backward(loss, &model).expect_err("all is frozen");
            assert!(matches!(error, Error::NoGraph), "{error}");
            let message = error.to_string();
            assert!(message.contains("ShardPolicy::lora"), "{message}");
            assert!(message.contains("entirely frozen"), "{message}");
        }
        // The remaining copy still works.
        let gradients = backward(model.loss(world.rank(), 1, &device), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), 25);
        Ok(())
    });
}
