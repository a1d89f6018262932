//! The part of a module that each rank holds: its elements, and its part of the gradients and states of a training run.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamW, AdamWConfig, AdamWState, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use burn_fsdp_shard::{Cut, LocalPart, LocalTensor, ShardPolicy, backward, local_state};

use super::bench::{
    Case, SEED, assert_close, build, device, on_ranks, params, plainly, seeded, sharded,
};
use super::nets::{CONV_NET, MLP, RECURRENT, input};

fn floats(tensor: &LocalTensor) -> Vec<f32> {
    let (words, _) = tensor.elements.as_bytes().as_chunks::<4>();
    words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
}

/// The rows of `number` that a rank has, divided as by `torch.chunk`.
fn rows_of(number: usize, ranks: usize, rank: usize) -> Range<usize> {
    let size = number.div_ceil(ranks);
    (rank * size).min(number)..((rank + 1) * size).min(number)
}

fn units(pattern: &str) -> ShardPolicy {
    ShardPolicy::new().units([pattern])
}

/// Asserts that every rank holds its rows of `num_cut` parameters, and the rest whole, with the plain module's values.
fn assert_rows<M: Module + 'static>(case: Case<M>, policy: &ShardPolicy, num_cut: usize) {
    for ranks in 1..=4 {
        let policy = policy.clone().cut(Cut::Dims);
        on_ranks(ranks, move |world| {
            let plain = params(&seeded((case.build)(&device()), SEED));
            let policy = policy.clone();
            let mut parts = local_state(&build(case, &world, &device(), policy)?)?;
            parts.retain(|part| !part.path.contains(".running_"));
            assert_eq!(parts.len(), plain.len());
            let mut cut = 0;
            for (part, (path, values)) in parts.iter().zip(&plain) {
                assert_eq!(part.path, *path);
                let LocalPart::Shard { range, .. } = &part.part else {
                    assert_eq!(floats(part), *values, "{path}");
                    continue;
                };
                let row_len: usize = part.shape[1..].iter().product();
                let rows = rows_of(part.shape[0], ranks, world.rank());
                let want = rows.start * row_len..rows.end * row_len;
                assert_eq!(*range, want, "{path} {:?}", part.shape);
                assert_eq!(floats(part), values[want], "{path}");
                cut += 1;
            }
            assert_eq!(cut, num_cut);
            Ok(())
        });
    }
}

/// A function of the parameter chooses: rows of some, elements of others.
#[test]
fn the_cut_is_chosen_by_path() {
    let policy = || {
        let policy = ShardPolicy::new().units(["blocks.*"]).cut(Cut::Dims);
        policy
            .cut_of(["blocks.*", "embed.weight"], Cut::Elements)
            .cut_of(["**.up.weight"], Cut::Dims)
    };
    let is_flat = |path: &str| {
        path == "embed.weight" || path.starts_with("blocks.") && !path.ends_with(".up.weight")
    };
    for ranks in 1..=4 {
        let got = sharded(MLP, ranks, 5, policy());
        assert_close(&got, &plainly(MLP, ranks, 5), 1e-5);
        on_ranks(ranks, move |world| {
            let model = build(MLP, &world, &device(), policy())?;
            let mut flat = 0;
            for part in local_state(&model)? {
                let LocalPart::Shard { range, .. } = &part.part else {
                    continue;
                };
                let rows = rows_of(part.shape[0], ranks, world.rank());
                let len: usize = part.shape.iter().product();
                let want = if is_flat(&part.path) {
                    rows_of(len, ranks, world.rank())
                } else {
                    let row: usize = part.shape[1..].iter().product();
                    rows.start * row..rows.end * row
                };
                flat += usize::from(is_flat(&part.path));
                assert_eq!(*range, want, "{}", part.path);
            }
            assert_eq!(flat, 1 + 3 * 2);
            let nowhere = ShardPolicy::new().cut_of(["tail"], Cut::Dims);
            let error = build(MLP, &world, &device(), nowhere).expect_err("no tail");
            assert!(error.to_string().contains("`tail`"), "{error}");
            Ok(())
        });
    }
}

#[test]
fn rows_are_never_cut() {
    assert_rows(MLP, &units("blocks.*"), 1 + 3 * 3 + 1);
    // Each row holds kernels with three dims.
    assert_rows(CONV_NET, &units("convs.*"), 3 + 1);
    // Fewer rows in a shard than in others, and none in the last.
    assert_rows(RECURRENT, &units("layers.*"), 2 * 8 + 1);
    // A row of a vector is one element.
    let with_vectors = units("blocks.*").shard_vectors(true);
    assert_rows(MLP, &with_vectors, 1 + 3 * 7 + 3);
}

/// Matrices and vectors with fewer elements, or rows, than four ranks.
#[derive(Module, Debug)]
struct Tiny {
    layers: Vec<Linear>,
}

const TINY: Case<Tiny> = Case {
    build: |device| {
        let linear = |(from, to)| LinearConfig::new(from, to).init(device);
        Tiny {
            layers: [(3, 1), (1, 2)].map(linear).to_vec(),
        }
    },
    loss: |model, rank, step, device| {
        let x = input([4, 3], rank, step, device);
        let layers = model.layers.iter();
        let y = layers.fold(x, |x, layer| layer.forward(x));
        y.powf_scalar(2.0).mean()
    },
};

/// The last ranks hold nothing of a parameter with fewer elements, or rows, than ranks.
#[test]
fn a_parameter_may_have_fewer_elements_than_ranks() {
    for (cut, vectors) in [
        (Cut::Elements, false),
        (Cut::Elements, true),
        (Cut::Dims, false),
        (Cut::Dims, true),
    ] {
        let policy = move || units("layers.*").cut(cut).shard_vectors(vectors);
        for ranks in 1..=4 {
            let got = sharded(TINY, ranks, 5, policy());
            assert_close(&got, &plainly(TINY, ranks, 5), 1e-5);
            let empty = on_ranks(ranks, move |world| {
                let model = build(TINY, &world, &device(), policy())?;
                let (mut empty, mut cut_up) = (0, 0);
                for part in local_state(&model)? {
                    let LocalPart::Shard { range, .. } = &part.part else {
                        continue;
                    };
                    let len: usize = part.shape.iter().product();
                    let row = match cut {
                        Cut::Dims => part.shape[1..].iter().product(),
                        _ => 1,
                    };
                    let rows = rows_of(len / row, ranks, world.rank());
                    assert_eq!(*range, rows.start * row..rows.end * row, "{}", part.path);
                    assert_eq!(floats(&part).len(), range.len(), "{}", part.path);
                    empty += usize::from(range.is_empty());
                    cut_up += 1;
                }
                assert_eq!(cut_up, if vectors { 4 } else { 2 });
                Ok(empty)
            });
            let last = empty.last().expect("a rank");
            assert!(ranks < 4 || *last > 0, "{cut:?}: {empty:?}");
        }
    }
}

/// AdamW that records the elements of a parameter, of its gradient and of a state.
#[derive(Clone)]
struct Witness {
    adam: AdamW,
    seen: Arc<Mutex<Vec<[usize; 3]>>>,
}

impl Optimizer for Witness {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let given = [tensor.shape(), grad.shape()].map(|shape| shape.num_elements());
        let (tensor, state) = self.adam.step(lr, tensor, grad, state);
        let kept = state.as_ref().map(|state| &state.momentum.moment_1);
        let kept = kept.map_or(0, |moment| moment.shape().num_elements());
        let mut seen = self.seen.lock().expect("no panic");
        seen.push([given[0], given[1], kept]);
        (tensor, state)
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

#[test]
fn gradients_and_states_cover_only_held_elements() {
    let cut = 11 * 15 + 15 * 7 + 9 * 15 * 7;
    let whole = 3 * (15 + 15 + 7 + 15) + 15 + 7;
    for ranks in 1..=4 {
        let sums = on_ranks(ranks, move |world| {
            let device = device();
            let policy = ShardPolicy::new().units(["blocks.*"]);
            let mut model = build(MLP, &world, &device, policy)?;
            let seen = Arc::new(Mutex::new(Vec::new()));
            let mut optim = ModuleOptimizer::from(Witness {
                adam: AdamWConfig::new().build(),
                seen: seen.clone(),
            });
            for step in 0..2 {
                let loss = (MLP.loss)(&model, world.rank(), step, &device);
                let gradients = backward(loss, &model)?;
                // The first step also tries the optimizer.
                seen.lock().expect("no panic").clear();
                model = optim.step(1e-2, model, gradients);
            }
            let seen = seen.lock().expect("no panic");
            assert_eq!(seen.len(), 1 + 3 * 7 + 3);
            Ok([0, 1, 2].map(|index| seen.iter().map(|sizes| sizes[index]).sum::<usize>()))
        });
        for index in 0..3 {
            let sum: usize = sums.iter().map(|sums| sums[index]).sum();
            assert_eq!(sum, cut + ranks * whole, "{ranks} ranks");
            // A share for each rank, rounded up by at most one element for every cut parameter.
            let most = cut / ranks + 11 + whole;
            assert!(sums.iter().all(|sums| sums[index] <= most), "{sums:?}");
        }
    }
}
