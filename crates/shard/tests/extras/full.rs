//! Whole parameters: for a closure on every rank, or one by one on rank 0.

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_fsdp_collectives::{CommCounter, OperationKind, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    BufferSync, ShardPolicy, Strategy, WriteBack, backward, full_state, fully_shard,
    params_with_gradient, summon_full_params, sync_buffers,
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

/// Loss of a step, to compare what modules hold.
fn loss<M>(case: Case<M>, model: &M, step: usize) -> f32 {
    (case.loss)(model, 0, step, &device()).into_scalar::<f32>()
}

#[test]
fn the_closure_sees_what_a_record_holds() {
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
                // Still sharded and trainable, and shards go on with their ids.
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
fn a_recurrent_module_and_the_copy_that_outlives_the_closure() {
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
fn the_copy_is_recorded_as_if_it_had_never_been_sharded() {
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
        // The ids in the record are those that the shards have.
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
