//! Functions that replace values replace all of them or none, regardless of their type.

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_fsdp_collectives::{OperationKind, ProcessGroup, ProcessMesh};
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Error, ShardPolicy, WriteBack, backward, dummy_forward, fully_shard, load_local_state,
    local_state, params_with_gradient, renew_stand_ins, stand_in_bytes, summon_full_params, units,
};

use super::bench::{build, device, on_ranks, ready, whole_params};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

fn line(world: &ProcessGroup) -> Result<ProcessMesh, Error> {
    Ok(ProcessMesh::new(world, Mesh::line("shard", world.size())?)?)
}

#[test]
fn a_refused_load_changes_no_copy() {
    // The number of tensors after which it fails, and the kind of failure.
    for (after, is_short) in [(0, false), (3, false), (24, false), (3, true)] {
        for (want, got) in on_ranks(2, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, blocks())?;
            let want = whole_params(Mlp::new(&device), &model);
            let mut seen = 0;
            let failed = load_local_state(model.clone(), |tensor| {
                seen += 1;
                match seen > after {
                    true if is_short => Ok(Some(vec![0; 1])),
                    true => Err(Error::NotSharded),
                    false => Ok(Some(vec![0; tensor.elements.len()])),
                }
            });
            assert!(failed.is_err());
            // At the latest in the next pass: with a learning rate of 0 nothing may change.
            let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
            let model = SgdConfig::new().init().step(0.0, model, gradients);
            Ok((want, whole_params(Mlp::new(&device), &model)))
        }) {
            assert_eq!(got, want);
        }
    }
}

#[derive(Module, Debug)]
struct Counting {
    layer: Linear,
    usage: Param<Tensor<1, Int>>,
    mask: Param<Tensor<2, Bool>>,
}

fn counting(device: &Device, usage: i64) -> Counting {
    let id = ParamId::new;
    Counting {
        layer: LinearConfig::new(4, 3).init(device),
        usage: Param::initialized(id(), Tensor::from_data([usage, 2 * usage], device)),
        mask: Param::initialized(id(), Tensor::from_data([[usage > 5, true, false]], device)),
    }
}

fn counts(model: &Counting) -> (Vec<i64>, Vec<bool>) {
    let usage = model.usage.val().into_data().convert::<i64>();
    let mask = model.mask.val().into_data();
    (
        usage.try_to_vec().expect("converted"),
        mask.try_to_vec().expect("native booleans"),
    )
}

#[test]
fn integers_and_booleans_are_state() {
    on_ranks(2, |world| {
        let device = device();
        let shard = |usage| {
            let model = ready(|| counting(&device, usage));
            fully_shard(model, &line(&world)?, ShardPolicy::new())
        };
        let model = shard(7)?;
        let state = local_state(&model)?;
        let paths: Vec<_> = state.iter().map(|tensor| tensor.path.as_str()).collect();
        assert_eq!(paths, ["layer.weight", "layer.bias", "usage", "mask"]);
        let other = load_local_state(shard(1)?, |tensor| {
            let saved = state.iter().find(|saved| saved.path == tensor.path);
            Ok::<_, Error>(saved.map(|saved| saved.elements.as_bytes().to_vec()))
        })?;
        assert_eq!(counts(&other), counts(&model));
        assert_eq!(counts(&other), (vec![7, 14], vec![true, true, false]));
        Ok(())
    });
}

#[test]
fn integers_and_booleans_are_written_back() {
    on_ranks(2, |world| {
        let device = device();
        let model = ready(|| counting(&device, 7));
        let model = fully_shard(model, &line(&world)?, ShardPolicy::new())?;
        let change = |mut full: Counting| {
            full.usage = full.usage.map(|usage| usage + 1);
            full.mask = full.mask.map(Tensor::bool_not);
            full
        };
        let model = summon_full_params(model, WriteBack::Discard, change)?;
        assert_eq!(counts(&model), (vec![7, 14], vec![true, true, false]));
        let model = summon_full_params(model, WriteBack::Keep, change)?;
        assert_eq!(counts(&model), (vec![8, 15], vec![false, false, true]));
        Ok(())
    });
}

#[test]
fn a_dummy_forward_reads_every_parameter_once() {
    for (ranks, policy) in [(2, blocks()), (3, ShardPolicy::new())] {
        for (loss, want, gathers, units) in on_ranks(ranks, move |world| {
            let device = device();
            let model = build(MLP, &world, &device, policy.clone())?;
            let whole = whole_params(Mlp::new(&device), &model);
            let mean =
                |(_, values): &(String, Vec<f32>)| values.iter().sum::<f32>() / values.len() as f32;
            let want: f32 = whole.iter().map(mean).sum();
            let loss = dummy_forward(&model)?;
            let first = loss.clone().into_scalar::<f32>();
            let gradients = backward(loss, &model)?;
            assert_eq!(params_with_gradient(&model, &gradients).len(), whole.len());
            // The first step agrees on each gather before it runs.
            let gathers = || world.counts().of(OperationKind::AllGather).operations;
            let before = gathers();
            backward(dummy_forward(&model)?, &model)?;
            Ok((first, want, gathers() - before, units(&model)?.len()))
        }) {
            assert!((loss - want).abs() < 1e-4, "{loss}, {want}");
            // The backward of a mean needs no weight.
            assert_eq!(gathers as usize, units);
        }
    }
}

/// Stands for a moving average, a clip of weights, and the like.
struct Halve;

impl ModuleMapper for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let (is_trained, device) = (tensor.is_require_grad(), tensor.device());
            let half = tensor.inner().mul_scalar(0.5).into_data();
            Tensor::from_data(half, &device).set_require_grad(is_trained)
        })
    }
}

#[test]
fn stand_ins_give_their_memory_back() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let before = whole_params(Mlp::new(&device), &model);
        let small = stand_in_bytes(&model)?;
        let model = model.map(&mut Halve);
        assert!(stand_in_bytes(&model)? > 10 * small);
        let model = renew_stand_ins(model)?;
        assert_eq!(stand_in_bytes(&model)?, small);
        let after = whole_params(Mlp::new(&device), &model);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            let half: Vec<_> = before.iter().map(|value| value * 0.5).collect();
            assert_eq!(*after, half, "{path}");
        }
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        assert_eq!(params_with_gradient(&model, &gradients).len(), before.len());
        Ok(())
    });
}
