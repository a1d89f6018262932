//! Refusals, and the texts of their messages.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::ProcessMesh;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, FullyShardedDataParallel, ShardPolicy, backward, catch, fully_shard, load_local_state,
    memory, wrap_plan,
};

use super::bench::{build, device, on_ranks, panic_of, ready};
use super::nets::{MLP, Mlp};

fn refusal<M: Module + 'static>(module: fn() -> M, policy: ShardPolicy) -> String {
    on_ranks(1, move |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        match fully_shard(module(), &mesh, policy.clone()) {
            Ok(_) => panic!("should be refused"),
            Err(error) => Ok(error.to_string()),
        }
    })
    .swap_remove(0)
}

#[test]
fn a_pattern_without_a_module_lists_the_modules() {
    let message = refusal(
        || Mlp::new(&device()),
        ShardPolicy::new().units(["layers.*"]),
    );
    assert!(message.contains("`layers.*`"), "{message}");
    assert!(message.contains("blocks.0.down"), "{message}");
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
}

#[test]
fn a_tied_parameter_is_named_by_both_paths() {
    let tied = || {
        let first = LinearConfig::new(3, 3).init(&device());
        let mut second = first.clone();
        let other = |value: Tensor<2>| (value.inner() + 1.0).autodiff().require_grad();
        second.weight = second.weight.map(other);
        Tied { first, second }
    };
    let message = refusal(tied, ShardPolicy::new());
    assert!(message.contains("`first.weight`"), "{message}");
    assert!(message.contains("`second.weight`"), "{message}");
}

#[test]
fn sharding_twice_is_refused() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        let model = build(MLP, &world, &device(), ShardPolicy::new())?;
        let error = fully_shard(model, &mesh, ShardPolicy::new()).expect_err("twice");
        assert!(matches!(error, Error::AlreadySharded { .. }), "{error}");
        Ok(())
    });
}

#[test]
fn an_adapter_that_would_be_lost_is_refused_by_name() {
    let adapted = || {
        let model = Mlp::new(&device());
        model.apply_lora(burn::module::Lora::new(2, 4.0))
    };
    let message = refusal(adapted, ShardPolicy::new().ignore(["embed"]));
    assert!(message.contains("embed.weight"), "{message}");
    assert!(message.contains("materialize"), "{message}");
}

#[test]
fn plain_modules_must_be_sharded_first() {
    let error = memory(&Mlp::new(&device())).expect_err("plain");
    assert!(error.to_string().contains("fully_shard"), "{error}");
}

#[derive(Module, Debug)]
struct Lopsided {
    small: Linear,
    large: [Param<Tensor<2>>; 2],
}

#[test]
fn a_unit_with_most_parameters_is_warned_about() {
    on_ranks(1, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 1)?)?;
        let device = device();
        let plan = |columns: [usize; 2]| {
            let large =
                columns.map(|columns| Param::from_tensor(Tensor::zeros([20, columns], &device)));
            let small = LinearConfig::new(2, 2).init(&device);
            let policy = ShardPolicy::new().units(["small"]);
            wrap_plan(&fully_shard(Lopsided { small, large }, &mesh, policy)?)
        };
        let divisible = plan([10, 10])?;
        assert!(
            divisible.warnings[0].contains("unit `root` holds 400 of 406"),
            "{divisible}"
        );
        assert!(divisible.to_string().contains("warning: "), "{divisible}");
        // Other units would not help.
        assert_eq!(plan([19, 1])?.warnings, [""; 0]);
        assert_eq!(plan([15, 5])?.warnings.len(), 1);
        Ok(())
    });
}

#[test]
fn a_backend_without_operations_names_the_features() {
    let message = refusal(
        || LinearConfig::new(2, 2).init(&Device::capture().autodiff()),
        ShardPolicy::new(),
    );
    assert!(message.contains("`weight`"), "{message}");
    assert!(message.contains("`Capture`"), "{message}");
    assert!(message.contains("features `wgpu`, `vulkan`"), "{message}");
}

#[test]
fn a_module_of_nothing_but_ignored_parameters_is_refused() {
    let message = refusal(|| Mlp::new(&device()), ShardPolicy::new().ignore(["*"]));
    assert!(message.contains("nothing to shard"), "{message}");
    assert!(message.contains("ignore fewer parameters"), "{message}");
    // A pattern cannot match the root, which has no name.
    let message = refusal(|| Mlp::new(&device()), ShardPolicy::new().ignore([""]));
    assert!(message.contains("`` matches no module"), "{message}");
}

#[test]
fn an_unknown_axis_is_named_with_the_mesh() {
    let message = refusal(|| Mlp::new(&device()), ShardPolicy::new().axis("model"));
    assert!(message.contains("no axis `model`"), "{message}");
    assert!(message.contains("`shard`"), "{message}");
    let message = refusal(
        || Mlp::new(&device()),
        ShardPolicy::new().replicate_axis("rows"),
    );
    assert!(message.contains("no axis `rows`"), "{message}");
}

#[test]
fn a_quantized_parameter_is_refused_by_path_and_type() {
    let quantized = || {
        let scheme = device().settings().quantization.scheme;
        let scheme = scheme.with_value(QuantValue::Q8S);
        let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
        let mut model = ready(|| Mlp::new(&Device::flex()));
        model.blocks[1].up = model.blocks[1].up.clone().quantize_weights(&mut quantizer);
        model
    };
    let message = refusal(quantized, ShardPolicy::new());
    assert!(message.contains("`blocks.1.up.weight`"), "{message}");
    assert!(message.contains("element type QFloat"), "{message}");
    assert!(message.contains("f32, f64, f16 or bf16"), "{message}");
}

/// Written by hand, and one field forgotten in `map`.
#[derive(Debug, Clone)]
struct Forgetful {
    mapped: Linear,
    forgotten: Linear,
}

impl Module for Forgetful {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.mapped.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            mapped: self.mapped.to_device(device),
            forgotten: self.forgotten.to_device(device),
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("mapped", "Forgetful");
        self.mapped.visit(visitor);
        visitor.exit_module("mapped", "Forgetful");
        visitor.enter_module("forgotten", "Forgetful");
        self.forgotten.visit(visitor);
        visitor.exit_module("forgotten", "Forgetful");
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("mapped", "Forgetful");
        let mapped = self.mapped.map(mapper);
        mapper.exit_module("mapped", "Forgetful");
        Self {
            mapped,
            forgotten: self.forgotten,
        }
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

#[test]
fn a_parameter_missed_by_map_is_rejected_with_path_and_shape() {
    let forgetful = || Forgetful {
        mapped: LinearConfig::new(3, 3).init(&device()),
        forgotten: LinearConfig::new(3, 5).init(&device()),
    };
    let message = refusal(forgetful, ShardPolicy::new());
    assert!(
        message.contains("`forgotten.weight` of shape [3, 5] would stay unsharded"),
        "{message}"
    );
    assert!(message.contains("`map` does not"), "{message}");
}

/// Written by hand, with its fields in a different order once it was mapped.
#[derive(Debug, Clone)]
struct Turned {
    fields: [(&'static str, Linear); 2],
}

impl Module for Turned {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.fields[0].1.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        let to = |(name, layer): (_, Linear)| (name, layer.to_device(device));
        Self {
            fields: self.fields.map(to),
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for (name, layer) in &self.fields {
            visitor.enter_module(name, "Turned");
            layer.visit(visitor);
            visitor.exit_module(name, "Turned");
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let mut fields = self.fields.map(|(name, layer)| {
            mapper.enter_module(name, "Turned");
            let layer = layer.map(mapper);
            mapper.exit_module(name, "Turned");
            (name, layer)
        });
        fields.sort_by_key(|(name, _)| *name);
        Self { fields }
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

#[test]
fn the_wrapper_refuses_a_module_whose_names_change_places() {
    on_ranks(2, |world| {
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
        let layer = || LinearConfig::new(3, 3).init(&device());
        let module = Turned {
            fields: [("second", layer()), ("first", layer())],
        };
        let refused = FullyShardedDataParallel::new(module, &mesh, ShardPolicy::new());
        let error = refused.expect_err("another order");
        assert!(matches!(error, Error::Names { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("second.weight") && text.contains("first.weight"),
            "{text}"
        );
        Ok(())
    });
}

#[test]
fn a_child_over_another_group_than_its_parent_is_refused_by_path() {
    let messages = on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let alone = world.split(world.rank(), 0, "alone")?;
        let alone = ProcessMesh::new(&alone, Mesh::line("shard", 1)?)?;
        let mut model = ready(|| Mlp::new(&device));
        model.head = fully_shard(model.head, &alone, ShardPolicy::new())?;
        let refused = fully_shard(model, &mesh, ShardPolicy::new());
        Ok(refused.expect_err("two groups").to_string())
    });
    for message in messages {
        assert!(message.contains("unit `head` is sharded over"), "{message}");
        assert!(message.contains("its parent over `world`"), "{message}");
        assert!(message.contains("over the same group"), "{message}");
    }
}

#[test]
fn bytes_of_another_length_are_refused_by_path() {
    on_ranks(2, |world| {
        let model = build(MLP, &world, &device(), ShardPolicy::new())?;
        let short = load_local_state(model, |tensor| {
            let is_head = tensor.path == "head.weight";
            Ok::<_, Error>(is_head.then(|| vec![0; 8]))
        });
        let message = short.expect_err("too short").to_string();
        // 15 x 7 elements: 53 on rank 0, 52 on rank 1.
        let expected = 4 * (53 - world.rank());
        assert!(
            message.contains(&format!("`head.weight`: expected {expected} bytes")),
            "{message}"
        );
        assert!(message.contains("got 8"), "{message}");
        Ok(())
    });
}

#[test]
fn a_rank_with_diverging_values_is_reported() {
    let message = panic_of(|| {
        on_ranks(2, |world| {
            let device = device();
            let policy = ShardPolicy::new().units(["blocks.*"]);
            let mut model = build(MLP, &world, &device, policy)?;
            if world.rank() == 1 {
                // A part is mapped only on one rank, and not used there.
                model.blocks[0] = model.blocks[0].clone().freeze();
            }
            drop(model.embed.weight.val());
            if world.rank() == 0 {
                drop(model.blocks[0].up.weight.val());
            }
            let loss = model.head.weight.val().sum();
            backward(loss, &model).map(drop)
        })
    });
    assert!(message.contains("blocks.0 unshard"), "{message}");
    assert!(message.contains("values"), "{message}");
}

/// While one thread of rank 0 waits in a gather, another one asks for a parameter.
#[test]
fn concurrent_use_of_a_module_is_rejected() {
    let (send, receive) = mpsc::channel();
    let receive = Mutex::new(receive);
    on_ranks(2, move |world| {
        let model = build(MLP, &world, &device(), ShardPolicy::new())?;
        if world.rank() == 1 {
            // The gather of rank 0 continues when one of its threads has been refused.
            let refused = receive
                .lock()
                .unwrap()
                .recv_timeout(Duration::from_secs(20));
            assert!(refused.is_ok(), "none is refused");
            drop(model.head.weight.val());
            return Ok(());
        }
        let refused = send.clone();
        let read = |model: Mlp| {
            let result = catch(|| drop(model.head.weight.val()));
            if result.is_err() {
                refused.send(()).expect("waited for");
            }
            result
        };
        let results = std::thread::scope(|scope| {
            let threads = [0, 1].map(|_| {
                let model = model.clone();
                scope.spawn(|| read(model))
            });
            threads.map(|thread| thread.join().expect("caught"))
        });
        let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        assert!(
            matches!(errors[..], [Error::Concurrent { rank: 0 }]),
            "{errors:?}"
        );
        let message = errors[0].to_string();
        assert!(message.contains("rayon::join"), "{message}");
        Ok(())
    });
}
