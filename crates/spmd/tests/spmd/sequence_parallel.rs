//! Activations with named placements, compared with one rank on the joined batch.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor};
use burn_fsdp_certificate::compile;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch};
use burn_fsdp_mesh::Placement::{Partial, Replicate, Shard};
use burn_fsdp_mesh::ReduceOp;
use burn_fsdp_spmd::graph::{CollectiveKind, Graph, Phase};
use burn_fsdp_spmd::{Error, Evaluation, Expand, Mode, named_activation};

use crate::compiled::seeded;
use crate::eager::{self, adamw};
use crate::models::{Gpt, TIME, TokenBatch, tokens};
use crate::placement::{ROWS, STEPS, assert_close, gpt, mesh, tensor_parallel, trained};

/// Tensor parallelism between the products of a block, with the values between two blocks cut along the tokens.
fn sequence_parallel() -> Expand {
    tensor_parallel().activation("residual", "model", Shard(1))
}

#[test]
fn sequence_parallel_blocks_match_one_rank() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let expected = eager::train(Gpt::new, Gpt::loss, batch, STEPS, |_| 1e-2, adamw().init());
    // With 6 tokens, the last of 4 ranks has none.
    for axes in [
        &[("model", 1)][..],
        &[("model", 2)],
        &[("model", 3)],
        &[("model", 4)],
    ] {
        let got = gpt(axes, sequence_parallel());
        assert_close(&format!("{axes:?}"), &got, &expected);
    }
    for axes in [
        &[("data", 2), ("model", 2)][..],
        &[("data", 1), ("model", 3)],
        &[("data", 3), ("model", 1)],
    ] {
        let expand = sequence_parallel().input("**", "data", Shard(0));
        assert_close(&format!("{axes:?}"), &gpt(axes, expand), &expected);
    }
    // Cuts along the features, which a norm needs whole, and along rows, along which no input is cut.
    for cut in [Shard(0), Shard(2), Replicate] {
        let expand = tensor_parallel().activation("residual", "model", cut);
        let got = gpt(&[("model", 3)], expand);
        assert_close(&format!("residual {cut}"), &got, &expected);
    }
}

/// Returns the graph of each rank of two, for the loss of a batch.
fn graph(expand: Expand, loss: fn(&Gpt, TokenBatch) -> Tensor<1>) -> Result<Graph, String> {
    let body = move |world: ProcessGroup| -> Result<_, Error> {
        let mode = Mode::expand(mesh(&world, &[("model", 2)])?, expand.clone());
        let mode = mode.verified().certified();
        let result = compile(Gpt::new, loss, adamw().build(), mode).and_then(|mut step| {
            step.step(1e-2, &tokens(0, 0, ROWS, &Device::flex()))?;
            Ok(step.graph().unwrap().clone())
        });
        Ok(result.map_err(|error| error.to_string()))
    };
    launch(LaunchConfig::new(2), body).unwrap().swap_remove(1)
}

/// Returns the shapes of the inputs of the norms' means in forward.
fn of_norms(graph: &Graph) -> Vec<Vec<usize>> {
    let forward = graph.nodes().iter();
    let forward = forward.filter(|node| node.phase == Phase::Forward);
    let means = forward.filter(|node| node.name().contains("MeanDim"));
    let shapes = means.map(|node| graph.value(node.inputs().next().unwrap()).unwrap());
    shapes.map(|value| value.shape.clone()).collect()
}

/// Counts the collectives of activations in forward, by kind.
fn of_activations(graph: &Graph, kind: CollectiveKind) -> usize {
    let forward = graph.nodes().iter();
    let forward = forward.filter(|node| node.phase == Phase::Forward);
    let collectives = forward.filter_map(|node| node.collective.as_ref());
    let of_kind = collectives.filter(|collective| collective.kind == kind);
    let labels = of_kind.filter(|of| of.parts.iter().any(|part| part.path.starts_with('%')));
    labels.count()
}

#[test]
fn norms_run_on_each_ranks_tokens_after_a_reduce_scatter() {
    let _guard = seeded();
    let cut = graph(sequence_parallel(), Gpt::loss).unwrap();
    let norms = 2 * 3 + 1;
    assert_eq!(of_norms(&cut), vec![[ROWS, TIME / 2, 12]; 2 * norms]);
    // The addends of a product, to which a bias and the residual are added before the name.
    assert_eq!(of_activations(&cut, CollectiveKind::AllReduce), 0);
    assert!(of_activations(&cut, CollectiveKind::ReduceScatter) >= 3);
    let whole = tensor_parallel().activation("residual", "model", Replicate);
    let whole = graph(whole, Gpt::loss).unwrap();
    assert!(of_activations(&whole, CollectiveKind::AllReduce) >= 3);
    assert!(of_norms(&whole).contains(&vec![ROWS, TIME, 12]));
}

/// Returns the loss of a model whose activations also have other names.
fn named_twice(model: &Gpt, (tokens, targets): TokenBatch) -> Tensor<1> {
    let logits = named_activation("logits", model.logits(tokens.clone()));
    let scores = named_activation("scores", logits);
    let loss = model.loss((tokens.clone(), targets));
    let inputs = named_activation("inputs", tokens.float());
    loss + scores.mean() * 0.0 + inputs.mean() * 0.0
}

fn named_weight(model: &Gpt, batch: TokenBatch) -> Tensor<1> {
    let weight = named_activation("weight", model.head_weight().transpose());
    model.loss(batch) + weight.mean() * 0.0
}

#[test]
fn impossible_placements_of_activations_are_rejected_by_name() {
    let _guard = seeded();
    let refused = |expand: Expand, loss| graph(expand, loss).err().unwrap_or_default();
    let ask = |name: &str, placement| Expand::new().activation(name, "model", placement);
    let unknown = refused(ask("resid", Shard(1)), Gpt::loss);
    assert!(unknown.contains("no activation \"resid\""), "{unknown}");
    assert!(unknown.contains("residual"), "{unknown}");
    assert!(refused(ask("residual", Shard(3)), Gpt::loss).contains("it has 3 dims"));
    let addends = refused(ask("residual", Partial(ReduceOp::Sum)), Gpt::loss);
    assert!(addends.contains("nothing reduces it"), "{addends}");
    let axis = Expand::new().activation("residual", "data", Shard(1));
    let axis = refused(axis, Gpt::loss);
    assert!(axis.contains("data"), "{axis}");
    let both = ask("logits", Shard(0)).activation("scores", "model", Shard(1));
    let both = refused(both, named_twice);
    assert!(both.contains("a different placement"), "{both}");
    let weight = refused(ask("weight", Shard(0)), named_weight);
    assert!(
        weight.contains("place it with Expand::parameter"),
        "{weight}"
    );
    // An uneven dim.
    graph(ask("logits", Shard(2)), named_twice).unwrap();
    // Equal requests, and one for a value that is computed only from the batch.
    let alike = ask("logits", Shard(1)).activation("scores", "model", Shard(1));
    graph(alike.activation("inputs", "model", Shard(1)), named_twice).unwrap();
}

/// Returns the loss of a model that names a concatenation, of rows that another axis cuts.
fn with_named_halves(model: &Gpt, (tokens, targets): TokenBatch) -> Tensor<1> {
    let logits = model.logits(tokens.clone());
    let halves = logits.chunk(2, 2);
    let turned = Tensor::cat(vec![halves[1].clone(), halves[0].clone()], 2);
    let turned = named_activation("turned", turned);
    let shares = named_activation("shares", softmax(turned, 2));
    model.loss((tokens, targets)) + shares.square().sum() / 100.0
}

#[test]
fn placing_activations_on_one_axis_keeps_the_other() {
    let _guard = seeded();
    let batch = |step, device: &Device| tokens(step, 0, ROWS, device);
    let optimizer = adamw().init();
    let expected = eager::train(
        Gpt::new,
        with_named_halves,
        batch,
        STEPS,
        |_| 1e-2,
        optimizer,
    );
    for (turned, shares) in [(1, 2), (2, 1)] {
        let expand = Expand::new()
            .input("**", "data", Shard(0))
            .activation("turned", "model", Shard(turned))
            .activation("shares", "model", Shard(shares));
        let axes: &[_] = &[("data", 2), ("model", 2)];
        let got = trained(
            4,
            move |world| Ok(Mode::expand(mesh(world, axes)?, expand.clone())),
            Gpt::new,
            with_named_halves,
            |step, rank, device| tokens(step, rank / 2 * (ROWS / 2), ROWS / 2, device),
        );
        assert_close(&format!("{turned}, {shares}"), &got, &expected);
    }
}

#[test]
fn evaluation_works_with_named_activations() {
    let _guard = seeded();
    let body = |world: ProcessGroup| -> Result<_, Error> {
        let device = Device::flex();
        let mode = Mode::expand(
            mesh(&world, &[("model", world.size())])?,
            sequence_parallel(),
        );
        let mut step = compile(Gpt::new, Gpt::loss, adamw().build(), mode)?;
        let batch = tokens(0, 0, ROWS, &device);
        step.step(1e-2, &batch)?;
        let mut logits = Evaluation::new(Gpt::new, |model: &Gpt, (tokens, _): TokenBatch| {
            model.logits(tokens)
        });
        let logits = step.evaluate(&mut logits, &batch)?;
        Ok(logits.into_data().try_to_vec::<f32>().unwrap())
    };
    let mut expected: Option<Vec<f32>> = None;
    // The 6 tokens do not divide among 4 or 5 ranks.
    for num_ranks in [1, 2, 3, 4, 5] {
        // The same initial parameters.
        Device::flex().seed(7);
        for own in launch(LaunchConfig::new(num_ranks), body).unwrap() {
            let expected = expected.get_or_insert_with(|| own.clone());
            for (own, expected) in own.iter().zip(expected) {
                assert!((own - *expected).abs() <= 1e-4, "{own} is not {expected}");
            }
        }
    }
}
