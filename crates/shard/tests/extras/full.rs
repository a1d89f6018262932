//! Whole parameters: for a closure on every rank, or one by one on rank 0.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    BufferSync, Error, InitialPart, ShardPolicy, Strategy, WriteBack, backward, full_state,
    fully_shard, fully_shard_from, local_ids, params_with_gradient, recorded_state,
    summon_full_params, sync_buffers, unsharded,
};

use super::bench::{Case, build, device, on_ranks, optimizer, params, ready, whole_params};
use super::nets::{CONV_NET, ConvNet, MLP, Mlp, RECURRENT};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn policies() -> [ShardPolicy; 3] {
    [
        blocks(),
        blocks().whole_below(110),
        blocks().strategy(Strategy::NoShard),
    ]
}

/// Loss of a step, to compare the values of modules.
fn loss<M>(case: Case<M>, model: &M, step: usize) -> f32 {
    (case.loss)(model, 0, step, &device()).into_scalar::<f32>()
}

#[test]
fn the_closure_sees_the_values_of_a_record() {
    for ranks in 1..=4 {
        for policy in policies() {
            on_ranks(ranks, move |world| {
                let device = device();
                let model = build(MLP, &world, &device, policy.clone())?;
                let want = whole_params((MLP.build)(&device), &model);
                let mut seen = Vec::new();
                let before = loss(MLP, &model, 0);
                let model = summon_full_params(model, WriteBack::Discard, |full| {
                    seen = params(&full);
                    assert_eq!(loss(MLP, &full, 0), before, "it runs");
                    full
                })?;
                assert_eq!(seen, want);
                assert_eq!(whole_params((MLP.build)(&device), &model), want);
                Ok(())
            });
        }
    }
}

fn doubled<M: Module>(module: M) -> M {
    struct Double;
    impl burn::module::ModuleMapper for Double {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.mul_scalar(2.0))
        }
    }
    module.map(&mut Double)
}

/// Other parameters are neither gathered nor changed.
#[test]
fn submodules_are_summoned_separately() {
    on_ranks(3, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let before = whole_params((MLP.build)(&device), &model);
        let counts = world.counts();
        let block = model.blocks.remove(1);
        let block = summon_full_params(block, WriteBack::Keep, doubled)?;
        model.blocks.insert(1, block);
        let since = world.counts().since(&counts);
        assert_eq!(
            since.of(OperationKind::AllGather).operations,
            3,
            "up, gate and down"
        );
        let after = whole_params((MLP.build)(&device), &model);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            let factor = if path.starts_with("blocks.1.") {
                2.0
            } else {
                1.0
            };
            let want: Vec<f32> = before.iter().map(|x| factor * x).collect();
            assert_eq!(*after, want, "{path}");
        }
        // Its training continues, together with its siblings.
        let mut plain = (MLP.build)(&device);
        plain = plain.load_record(model.clone().into_record());
        let want = loss(MLP, &plain, 0);
        assert_eq!(loss(MLP, &model, 0), want);
        let gradients = backward((MLP.loss)(&model, 0, 0, &device), &model)?;
        assert!(!params_with_gradient(&model, &gradients).is_empty());
        Ok(())
    });
}

#[test]
fn changes_are_written_back_or_forgotten() {
    for ranks in 1..=4 {
        for policy in policies() {
            on_ranks(ranks, move |world| {
                let device = device();
                let model = build(MLP, &world, &device, policy.clone())?;
                let before = whole_params((MLP.build)(&device), &model);
                let model = summon_full_params(model, WriteBack::Discard, doubled)?;
                assert_eq!(whole_params((MLP.build)(&device), &model), before);
                let model = summon_full_params(model, WriteBack::Keep, doubled)?;
                let after = whole_params((MLP.build)(&device), &model);
                for ((path, before), (_, after)) in before.iter().zip(&after) {
                    let twice: Vec<f32> = before.iter().map(|x| 2.0 * x).collect();
                    assert_eq!(&twice, after, "{path}");
                }
                // Still sharded and trainable, and shards keep their ids.
                let mut optim = optimizer();
                let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
                let model = optim.step(1e-2, model, gradients);
                let model = summon_full_params(model, WriteBack::Keep, |full| full)?;
                let gradients = backward(model.loss(world.rank(), 1, &device), &model)?;
                assert_eq!(params_with_gradient(&model, &gradients).len(), before.len());
                optim.step(1e-2, model, gradients);
                Ok(())
            });
        }
    }
}

#[test]
fn copies_of_recurrent_modules_can_outlive_the_closure() {
    on_ranks(2, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["layers.*"]);
        let model = build(RECURRENT, &world, &device, policy)?;
        let mut kept = None;
        let model = summon_full_params(model, WriteBack::Discard, |full| {
            kept = Some(full.clone());
            full
        })?;
        let before = loss(RECURRENT, &model, 0);
        let kept = kept.expect("the closure ran");
        assert_eq!(loss(RECURRENT, &kept, 0), before);
        let gradients = backward((RECURRENT.loss)(&model, 0, 0, &device), &model)?;
        let model = optimizer().step(1e-1, model, gradients);
        assert_ne!(loss(RECURRENT, &model, 0), before);
        assert_eq!(loss(RECURRENT, &kept, 0), before, "a copy of its own");
        Ok(())
    });
}

#[test]
fn records_of_the_copy_match_an_unsharded_module() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let want = params(&doubled(
            (MLP.build)(&device).load_record(model.clone().into_record()),
        ));
        let mut loaded = Vec::new();
        summon_full_params(model, WriteBack::Discard, |full| {
            let full = doubled(full);
            let record = full.clone().into_record();
            loaded = params(&(MLP.build)(&device).load_record(record));
            full
        })?;
        assert_eq!(loaded, want);
        Ok(())
    });
}

#[test]
fn running_states_of_the_copy_are_its_own_until_written_back() {
    on_ranks(2, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["convs.*"]);
        let model = build(CONV_NET, &world, &device, policy)?;
        let mean = |model: &ConvNet| {
            let mean = model.norms[0].running_mean.value_sync().into_data();
            mean.try_to_vec::<f32>().expect("f32")
        };
        drop((CONV_NET.loss)(&model, world.rank(), 0, &device));
        let before = mean(&model);
        let model = summon_full_params(model, WriteBack::Discard, doubled)?;
        assert_eq!(mean(&model), before);
        let model = summon_full_params(model, WriteBack::Keep, doubled)?;
        let twice: Vec<f32> = before.iter().map(|x| 2.0 * x).collect();
        assert_eq!(mean(&model), twice);
        Ok(())
    });
}

#[test]
fn another_module_is_refused_by_the_path() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let message = summon_full_params(model, WriteBack::Keep, |mut full: Mlp| {
            full.blocks[1].up.weight = Param::from_tensor(Tensor::zeros([15, 8], &device));
            full
        })
        .expect_err("another shape")
        .to_string();
        assert!(message.contains("`blocks.1.up.weight`"), "{message}");
        assert!(message.contains("expected shape [15, 7]"), "{message}");
        assert!(message.contains("[15, 8]"), "{message}");
        let model = build(MLP, &world, &device, blocks())?;
        let message = summon_full_params(model, WriteBack::Keep, |mut full: Mlp| {
            full.blocks.pop();
            full
        })
        .expect_err("too few")
        .to_string();
        assert!(message.contains("nothing at `blocks.2."), "{message}");
        Ok(())
    });
}

type Streamed = (String, Vec<usize>, Vec<f32>);

fn streamed<M: Module>(model: &M) -> Result<Vec<Streamed>, burn_fsdp_shard::Error> {
    let mut seen = Vec::new();
    full_state(model, |tensor| {
        assert_eq!(tensor.dtype, DType::F32);
        let (words, _) = tensor.bytes.as_chunks::<4>();
        let values = words.iter().map(|word| f32::from_ne_bytes(*word));
        seen.push((
            tensor.path.to_owned(),
            tensor.shape.to_vec(),
            values.collect(),
        ));
    })?;
    Ok(seen)
}

#[test]
fn rank_0_gets_the_whole_state_one_tensor_at_a_time() {
    for ranks in 1..=4 {
        for policy in policies() {
            let is_sharded = !format!("{policy:?}").contains("NoShard");
            on_ranks(ranks, move |world| {
                let device = device();
                let model = build(MLP, &world, &device, policy.clone())?;
                let want = whole_params((MLP.build)(&device), &model);
                let counter = CommCounter::new([&world]);
                let seen = streamed(&model)?;
                let gathers = counter.counts().of(OperationKind::Gather).operations;
                assert_eq!(
                    gathers == counter.counts().total().operations,
                    is_sharded || gathers == 0
                );
                assert_eq!(gathers > 0, is_sharded);
                if world.rank() > 0 {
                    assert_eq!(seen, []);
                    return Ok(());
                }
                let shapes: Vec<usize> = seen[0].1.clone();
                assert_eq!(shapes, [11, 15]);
                let seen = seen.into_iter().map(|(path, _, values)| (path, values));
                assert_eq!(seen.collect::<Vec<_>>(), want);
                Ok(())
            });
        }
    }
}

#[test]
fn running_states_are_streamed_with_their_last_update() {
    on_ranks(2, |world| {
        let device = device();
        let policy = ShardPolicy::new().units(["convs.*"]);
        let model = build(CONV_NET, &world, &device, policy)?;
        drop((CONV_NET.loss)(&model, world.rank(), 0, &device));
        let model = sync_buffers(model, BufferSync::Average)?;
        drop((CONV_NET.loss)(&model, world.rank(), 1, &device));
        let seen = streamed(&model)?;
        if world.rank() == 0 {
            let streamed = seen.iter().find(|(path, ..)| path == "norms.2.running_var");
            let own = model.norms[2].running_var.value_sync().into_data();
            assert_eq!(
                streamed.expect("there").2,
                own.try_to_vec::<f32>().expect("f32")
            );
        }
        Ok(())
    });
}

#[test]
fn a_record_from_before_sharding_loads_and_trains_on() {
    on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let plain = ready(|| Mlp::new(&device));
        // The ids in the record equal the shards' ids.
        let record = plain.clone().into_record();
        let model = fully_shard(plain, &mesh, blocks())?.load_record(record);
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let before = params_with_gradient(&model, &gradients).len();
        let model = optimizer().step(1e-2, model, gradients);
        let gradients = backward(model.loss(world.rank(), 1, &device), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), before);
        Ok(())
    });
}

/// A layer whose record is its transpose, one whose record is not, and running states.
#[derive(Module, Debug)]
struct Turned {
    turned: Linear,
    plain: Linear,
    norm: BatchNorm,
}

impl Turned {
    fn new(device: &Device) -> Self {
        let turned = LinearConfig::new(5, 7).with_layout(LinearLayout::Col);
        Self {
            turned: turned.init(device),
            plain: LinearConfig::new(7, 3).init(device),
            norm: BatchNormConfig::new(3).init(device),
        }
    }
}

/// Burn's record of a plain module.
#[derive(Default)]
struct Recorded {
    path: Vec<String>,
    found: Vec<(String, TensorData)>,
}

impl ModuleVisitor for Recorded {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let data = param.transform_for_save().val().into_data();
        self.found.push((self.path.join("."), data));
    }
}

#[test]
fn records_are_streamed_tensor_by_tensor() {
    for ranks in 1..=4 {
        for policy in [
            ShardPolicy::new().units(["turned"]),
            ShardPolicy::new().one_owner(["**"]),
            ShardPolicy::new().strategy(Strategy::NoShard),
        ] {
            on_ranks(ranks, move |world| {
                let device = device();
                let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
                let plain = ready(|| Turned::new(&device));
                let mut want = Recorded::default();
                plain.visit(&mut want);
                let model = fully_shard(plain, &mesh, policy.clone())?;
                let mut seen = Vec::new();
                let mut ids = Vec::new();
                recorded_state(&model, |tensor| {
                    ids.push((tensor.path.clone(), tensor.id));
                    seen.push((tensor.path, tensor.data));
                })?;
                if world.rank() > 0 {
                    assert_eq!(seen, []);
                    return Ok(());
                }
                assert_eq!(seen, want.found);
                assert_eq!(seen[0].1.shape()[..], [7, 5], "the transpose");
                for local in local_ids(&model)? {
                    assert!(ids.contains(&(local.path, local.recorded)));
                }
                Ok(())
            });
        }
    }
}

#[test]
fn only_the_keeping_ranks_get_the_whole_module() {
    for policy in policies() {
        on_ranks(3, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let want = whole_params((MLP.build)(&device), &model);
            let kept = unsharded(&model, world.rank() == 1)?;
            assert_eq!(kept.is_some(), world.rank() == 1);
            if let Some(kept) = kept {
                assert_eq!(params(&kept), want);
            }
            // Sharded as before.
            assert_eq!(whole_params((MLP.build)(&device), &model), want);
            Ok(())
        });
    }
}

#[test]
fn values_read_by_ranks_become_the_modules() {
    for ranks in 1..=4 {
        for policy in policies() {
            on_ranks(ranks, move |world| {
                let device = device();
                let mesh = ProcessMesh::new(&world, Mesh::line("shard", world.size())?)?;
                let values = |part: &InitialPart<'_>| {
                    assert_eq!(part.dtype, DType::F32);
                    assert!(part.range.end <= part.shape.iter().product());
                    let first = part.path.len();
                    let values = part.range.clone().map(|i| (first + i) as f32);
                    values.flat_map(f32::to_ne_bytes).collect::<Vec<u8>>()
                };
                let read = |part: &InitialPart<'_>| {
                    // One of them begins with rank 0's value.
                    let is_read = part.path != "blocks.1.up.weight";
                    Ok::<_, Error>(is_read.then(|| values(part)))
                };
                let plain = ready(|| Mlp::new(&device));
                let own = params(&plain);
                let model = fully_shard_from(plain, &mesh, policy.clone(), read)?;
                let got = whole_params((MLP.build)(&device), &model);
                for ((path, got), (_, own)) in got.into_iter().zip(own) {
                    let want = (0..got.len()).map(|i| (path.len() + i) as f32);
                    match path.as_str() {
                        "blocks.1.up.weight" if world.rank() == 0 => assert_eq!(got, own),
                        "blocks.1.up.weight" => assert_eq!(got.len(), own.len()),
                        _ => assert_eq!(got, want.collect::<Vec<_>>(), "{path}"),
                    }
                }
                // It trains.
                let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
                optimizer().step(1e-2, model, gradients);
                // Too few bytes, and an error of the reader.
                let read = |_: &InitialPart<'_>| Ok::<_, Error>(Some(vec![0; 3]));
                let short = fully_shard_from(Mlp::new(&device), &mesh, policy.clone(), read);
                let short = short.expect_err("3 bytes").to_string();
                assert!(short.contains("got 3"), "{short}");
                let gone = || Error::Group {
                    unit: "the disk is gone".to_owned(),
                    expected: String::new(),
                    got: String::new(),
                };
                let read = |_: &InitialPart<'_>| Err(gone());
                let failed = fully_shard_from(Mlp::new(&device), &mesh, policy.clone(), read);
                let failed = failed.expect_err("it fails").to_string();
                assert!(failed.contains("the disk is gone"), "{failed}");
                Ok(())
            });
        }
    }
}
