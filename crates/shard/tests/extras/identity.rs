//! Ids: groups made before and after sharding, records, and the state of optimizers with them.

use burn::lr_scheduler::constant::ConstantLr;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::optim::{GradientsParams, OptimizerRecord, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Tensor};
use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, FullyShardedDataParallel, ShardPolicy, backward, catch, fully_shard, into_record,
    local_ids, param_id, params_with_gradient, recompute, settle_ids,
};

use super::bench::{build, device, on_ranks, optimizer, params, ready, whole_params};
use super::nets::{Block, MLP, Mlp, tokens};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

fn value(of: &[(String, Vec<f32>)], path: &str) -> Vec<f32> {
    let found = of.iter().find(|(known, _)| known == path);
    found.expect("a parameter").1.clone()
}

/// The whole parameters, whatever other copies there are.
fn whole(model: &Mlp) -> Result<Vec<(String, Vec<f32>)>, Error> {
    let record = into_record(model.clone())?;
    Ok(params(&Mlp::new(&device()).load_record(record)))
}

/// Which of `head.weight` and `norm.gamma` change in a step with a learning rate of 0 in `group`.
fn changed_by_a_step(
    world: &ProcessGroup,
    model: Mlp,
    group: ParamGroup,
) -> Result<(bool, bool), Error> {
    let before = whole(&model)?;
    let mut scheduler = ModuleLrScheduler::new(ConstantLr::new(0.1));
    scheduler = scheduler.with_group(group, ConstantLr::new(0.0));
    let gradients = backward(model.loss(world.rank(), 0, &device()), &model)?;
    let model = SgdConfig::new()
        .init()
        .step(scheduler.step(), model, gradients);
    let after = whole(&model)?;
    let changed = |path| value(&before, path) != value(&after, path);
    Ok((changed("head.weight"), changed("norm.gamma")))
}

#[test]
fn groups_of_ids_act_whenever_they_were_made() {
    for ranks in 1..=2 {
        let seen = on_ranks(ranks, |world| {
            let device = device();
            let model = ready(|| Mlp::new(&device));
            let before = ParamGroup::ids_from_module(model.head.clone());
            let model = fully_shard(model, &line(&world)?, blocks())?;
            let after = ParamGroup::ids_from_module(model.head.clone());
            let by_id = ParamGroup::from_ids(vec![param_id(&model.head.weight)]);
            let groups = [before, after, by_id].into_iter();
            groups
                .map(|group| changed_by_a_step(&world, model.clone(), group))
                .collect::<Result<Vec<_>, _>>()
        });
        for changed in seen {
            assert_eq!(changed, [(false, true); 3]);
        }
    }
}

#[test]
fn a_group_of_ids_is_frozen() {
    on_ranks(2, |world| {
        let device = device();
        let model = ready(|| Mlp::new(&device));
        let group = ParamGroup::from_ids(vec![model.head.weight.id]);
        let id = model.head.weight.id;
        let model = fully_shard(model, &line(&world)?, blocks())?;
        assert_eq!(param_id(&model.head.weight), id);
        let ids = local_ids(&model)?;
        let head = ids.iter().find(|local| local.path == "head.weight");
        assert_eq!(head.map(|local| local.id), Some(id));
        let model = model.freeze_group(group);
        let mut gradients = model.loss(world.rank(), 0, &device).backward();
        let wanted = [param_id(&model.norm.gamma), id];
        let gradients = GradientsParams::from_params(&mut gradients, &model, &wanted);
        assert_eq!(params_with_gradient(&model, &gradients), ["norm.gamma"]);
        Ok(())
    });
}

/// Records of a model and its optimizer, as one of Burn's checkpointers writes them.
fn recorded(model: &Mlp, optimizer: &burn::optim::ModuleOptimizer) -> (Vec<u8>, Vec<u8>) {
    let model = model.clone().into_record().into_bytes().expect("in memory");
    let optimizer = optimizer.to_record().into_bytes().expect("in memory");
    (model.to_vec(), optimizer.to_vec())
}

fn train(
    mut model: Mlp,
    optimizer: &mut burn::optim::ModuleOptimizer,
    steps: std::ops::Range<usize>,
    rank: usize,
) -> Result<Mlp, Error> {
    let device = device();
    for step in steps {
        let gradients = backward(model.loss(rank, step, &device), &model)?;
        model = optimizer.step(1e-2, model, gradients);
    }
    Ok(model)
}

/// A run that was recorded by Burn and continues in another process, where all ids are new.
#[test]
fn records_of_model_and_optimizer_resume_bit_for_bit() {
    for ranks in 1..=3 {
        for (got, want) in on_ranks(ranks, |world| {
            let device = device();
            let rank = world.rank();
            let mut optim = optimizer();
            let model = build(MLP, &world, &device, blocks())?;
            let model = train(model, &mut optim, 0..3, rank)?;
            let (of_model, of_optimizer) = recorded(&model, &optim);
            let model = train(model, &mut optim, 3..6, rank)?;
            let want = whole_params(Mlp::new(&device), &model);

            let mut optim = optimizer();
            let model = build(MLP, &world, &device, blocks())?;
            let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(of_model));
            let model = model.load_record(record.expect("well formed"));
            let record = OptimizerRecord::from_bytes(Bytes::from_bytes_vec(of_optimizer));
            optim = optim.load_record(record.expect("well formed"));
            let num_states = optim.to_record().len();
            let model = train(model, &mut optim, 3..6, rank)?;
            assert_eq!(optim.to_record().len(), num_states, "all states were found");
            Ok((whole_params(Mlp::new(&device), &model), want))
        }) {
            assert_eq!(got, want);
        }
    }
}

/// No function of the engine is called between loading and the optimizer's step.
#[test]
fn ids_settle_on_demand() {
    on_ranks(2, |world| {
        let device = device();
        let record = build(MLP, &world, &device, blocks())?.into_record();
        let model = build(MLP, &world, &device, blocks())?.load_record(record);
        settle_ids(&model);
        let group = ParamGroup::ids_from_module(model.head.clone());
        let gradients = model.loss(world.rank(), 0, &device).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        let ids = local_ids(&model)?;
        assert!(ids.iter().all(|local| {
            let is_there = gradients.get::<1>(local.id).is_some();
            is_there && group.matches(&local.id, None) == local.path.starts_with("head.")
        }));
        Ok(())
    });
}

#[test]
fn a_record_taken_before_sharding_loads_after_it() {
    on_ranks(2, |world| {
        let device = device();
        let plain = ready(|| Mlp::new(&device));
        let record = plain.clone().into_record();
        let model = fully_shard(plain, &line(&world)?, blocks())?.load_record(record);
        let before = whole_params(Mlp::new(&device), &model);
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), before.len());
        let model = optimizer().step(1e-2, model, gradients);
        let after = whole_params(Mlp::new(&device), &model);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            assert!(before != after, "{path} is trained");
            assert!(after.iter().all(|value| value.is_finite()), "{path}");
        }
        Ok(())
    });
}

#[test]
fn copies_with_other_values_do_not_hinder_a_record() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let best = model.clone();
        let want = whole_params(Mlp::new(&device), &best);
        let model = train(model, &mut optimizer(), 0..2, world.rank())?;
        assert_eq!(whole(&best)?, want);
        let of_model = whole(&model)?;
        let refused = catch(|| model.clone().into_record()).expect_err("two copies");
        let message = refused.to_string();
        assert!(
            message.contains("burn_fsdp::state::into_record"),
            "{message}"
        );
        drop(best);
        assert_eq!(whole_params(Mlp::new(&device), &model), of_model);
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Pair {
    online: Mlp,
    average: Mlp,
}

#[test]
fn one_module_may_hold_two_copies() {
    on_ranks(2, |world| {
        let device = device();
        let average = build(MLP, &world, &device, blocks())?;
        let online = train(average.clone(), &mut optimizer(), 0..2, world.rank())?;
        let of_average = whole(&average)?;
        let of_online = whole(&online)?;
        assert_ne!(of_average, of_online);
        let record = into_record(Pair { online, average })?;
        let plain = Pair {
            online: Mlp::new(&device),
            average: Mlp::new(&device),
        };
        let plain = plain.load_record(record);
        assert_eq!(params(&plain.online), of_online);
        assert_eq!(params(&plain.average), of_average);
        Ok(())
    });
}

#[test]
fn the_wrapper_records_and_loads_despite_copies() {
    on_ranks(2, |world| {
        let device = device();
        let wrap = || {
            let model = ready(|| Mlp::new(&device));
            FullyShardedDataParallel::new(model, &line(&world)?, blocks())
        };
        let model = wrap()?;
        let best = model.clone();
        let gradients = model.backward(model.loss(world.rank(), 0, &device))?;
        let model = optimizer().step(1e-2, model, gradients);
        let record = model.clone().into_record();
        drop(best);
        let want = whole_params(Mlp::new(&device), model.module());
        assert_eq!(params(&Mlp::new(&device).load_record(record.clone())), want);
        let other = wrap()?.load_record(record);
        assert_eq!(whole_params(Mlp::new(&device), other.module()), want);
        assert_eq!(
            param_id(&other.module().head.weight),
            param_id(&model.module().head.weight)
        );
        Ok(())
    });
}

#[test]
fn a_checkpointed_region_is_not_a_copy() {
    on_ranks(2, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optim = optimizer();
        let loss = |model: &Mlp, step: usize| {
            let tokens = tokens([2, 4], 11, world.rank(), step, &device);
            let mut x = model.embed.forward(tokens);
            for block in &model.blocks {
                x = recompute(block, x, |block: &Block, x| block.forward(x));
            }
            let x = model.head.forward(model.norm.forward(x));
            x.powf_scalar(2.0).mean()
        };
        for step in 0..3 {
            let gradients = backward(loss(&model, step), &model)?;
            // A metric with a graph that is never differentiated.
            drop(loss(&model, step));
            model = optim.step(1e-2, model, gradients);
            catch(|| model.clone().into_record())?;
        }
        Ok(())
    });
}

struct Rebuild;

impl ModuleMapper for Rebuild {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, _) = param.consume();
        Param::initialized(id, tensor)
    }
}

#[test]
fn mappers_that_break_records_are_named() {
    on_ranks(2, |world| {
        let model = build(MLP, &world, &device(), blocks())?.map(&mut Rebuild);
        let error = catch(|| model.clone().into_record()).expect_err("shards");
        let message = error.to_string();
        assert!(message.contains("`embed.weight`"), "{message}");
        assert!(message.contains("from_mapped_value"), "{message}");
        // A group that has the shard but not its stand-in is also named.
        let model = build(MLP, &world, &device(), blocks())?;
        let group = ParamGroup::from_ids(vec![param_id(&model.head.weight)]);
        let error = catch(|| model.into_record_group(group)).expect_err("a shard");
        assert!(error.to_string().contains("`head.weight`"), "{error}");
        Ok(())
    });
}
