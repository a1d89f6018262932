//! The calls that are allowed between steps, while a forward waits, and inside a backward.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_fsdp_collectives::ProcessMesh;
use burn_fsdp_mesh::Mesh;
use burn_fsdp_shard::{
    Clip, Error, Norm, ShardPolicy, UnitState, backward, catch, clip_grad_norm, fully_shard,
    grad_norm, memory, no_sync, reset, units,
};

use super::bench::{build, device, on_ranks, panic_of};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Returns the results of all calls that belong between steps.
fn calls(model: &Mlp) -> Vec<Result<(), Error>> {
    let none = GradientsParams::new;
    let switch = |sync| -> Result<(), Error> {
        units(model)?
            .iter()
            .try_for_each(|unit| unit.set_requires_gradient_sync(sync))
    };
    vec![
        grad_norm(model, &none(), Norm::default()).map(drop),
        clip_grad_norm(model, none(), Clip::to(1.0)).map(drop),
        no_sync(model, || ()),
        switch(true),
        units(model).and_then(|units| {
            units
                .iter()
                .try_for_each(|unit| unit.set_divide_factors(None))
        }),
    ]
}

fn assert_refused(results: Vec<Result<(), Error>>, stage: &str, advice: &str) {
    assert_eq!(results.len(), 5);
    for result in results {
        let message = result.expect_err("not between steps").to_string();
        let states = format!("unit `root` is in phase {stage}, but must be in phase Idle; ");
        assert!(message.starts_with(&states), "{message}");
        assert!(message.contains(advice), "{message}");
    }
}

fn assert_allowed(results: Vec<Result<(), Error>>) {
    results
        .into_iter()
        .for_each(|result| result.unwrap_or_else(|error| panic!("between steps: {error}")));
}

#[test]
fn clipping_and_switching_wait_for_the_backward_of_a_forward() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        assert_allowed(calls(&model));
        let loss = model.loss(world.rank(), 0, &device);
        assert_refused(calls(&model), "Forward", "run the backward");
        let gradients = backward(loss, &model)?;
        assert_allowed(calls(&model));
        clip_grad_norm(&model, gradients, Clip::to(1.0))?;
        // A forward without a backward.
        drop(model.loss(world.rank(), 1, &device));
        assert_refused(calls(&model), "Forward", "`reset` the module");
        reset(&model)?;
        assert_allowed(calls(&model));
        let plain = device.without_autodiff();
        drop(model.valid().loss(world.rank(), 1, &plain));
        assert_allowed(calls(&model));
        Ok(())
    });
}

#[test]
fn an_abandoned_copy_leaves_the_next_one_between_steps() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let next = model.clone().fork(&device);
        drop(model.loss(world.rank(), 0, &device));
        assert_refused(calls(&next), "Forward", "run the backward");
        drop(model);
        assert_allowed(calls(&next));
        Ok(())
    });
}

/// A place for an input of a hook, or for its result.
type Shared<T> = Arc<Mutex<Option<T>>>;

/// Runs a backward whose gradient hook calls `body`, once per rank, with the module.
fn in_a_hook<T: Send + 'static>(
    body: fn(&Mlp) -> T,
) -> Vec<(Result<GradientsParams, String>, Option<T>)> {
    on_ranks(2, move |world| {
        let device = device();
        let (module, seen): (Shared<Mlp>, Shared<T>) = Default::default();
        let policy = blocks().gradient_hook({
            let (module, seen) = (module.clone(), seen.clone());
            move |_, gradient| {
                if let Some(module) = module.lock().expect("no panic").take() {
                    *seen.lock().expect("no panic") = Some(body(&module));
                }
                gradient
            }
        });
        let model = build(MLP, &world, &device, policy)?;
        *module.lock().expect("no panic") = Some(model.clone());
        let loss = model.loss(world.rank(), 0, &device);
        let result = backward(loss, &model).map_err(|error| error.to_string());
        let seen = seen.lock().map(|mut seen| seen.take());
        Ok((result, seen.unwrap_or_default()))
    })
}

#[test]
fn clipping_and_switching_inside_backward_are_refused() {
    for (result, seen) in in_a_hook(calls) {
        assert!(!result.expect("the step goes on").is_empty());
        let seen = seen.expect("the hook ran");
        assert_refused(seen, "Backward", "after `backward` has returned");
    }
    let reshard = |model: &Mlp| units(model).map(|units| units[1].reshard().map_err(text));
    for (_, seen) in in_a_hook(reshard) {
        let units = seen.expect("the hook ran").expect("sharded");
        let message = units.expect_err("inside a backward");
        assert!(message.contains("in phase Backward"), "{message}");
        assert!(message.contains("switch units between steps"), "{message}");
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Without the check the hook would wait for itself.
#[test]
fn a_hook_that_uses_the_module_is_an_error_not_a_hang() {
    let touch = |model: &Mlp| drop(model.blocks[0].up.weight.val());
    let ask = |model: &Mlp| drop(memory(model));
    for body in [touch, ask] {
        for (result, _) in in_a_hook(body) {
            let message = result.expect_err("refused");
            assert!(message.contains("used in one of them"), "{message}");
            assert!(
                message.contains("do not use a sharded module in a hook"),
                "{message}"
            );
        }
    }
}

#[test]
fn a_hook_that_returns_a_graph_is_refused_by_path() {
    let message = panic_of(|| {
        on_ranks(1, |world| {
            let device = device();
            let policy = blocks().gradient_hook(|_, gradient| gradient.autodiff());
            let model = build(MLP, &world, &device, policy)?;
            backward(model.loss(0, 0, &device), &model).map(drop)
        })
    });
    assert!(message.contains("gradient of `blocks.2."), "{message}");
    assert!(message.contains("elements with a graph"), "{message}");
    assert!(message.contains("`Tensor::inner`"), "{message}");
}

#[test]
fn units_are_not_switched_inside_no_sync() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let switched = no_sync(&model, || {
            units(&model)?[2].set_requires_gradient_sync(true)
        });
        let message = switched.expect_err("switched").to_string();
        assert!(message.contains("unit `blocks.1`"), "{message}");
        assert!(message.contains("is set to sync gradients"), "{message}");
        assert!(message.contains("inside `no_sync`"), "{message}");
        // Nesting has no effect of its own; afterwards everything is as before.
        no_sync(&model, || no_sync(&model, || ()))??;
        assert!(!backward(model.loss(world.rank(), 0, &device), &model)?.is_empty());
        Ok(())
    });
}

#[test]
fn a_unit_resharded_in_the_middle_of_its_use_is_named() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let block = &units(&model)?[1];
        let error = catch(|| {
            drop(model.blocks[0].up.weight.val());
            block.reshard()?;
            drop(model.blocks[0].down.weight.val());
            Ok::<_, Error>(())
        });
        let message = error.expect_err("resharded").to_string();
        assert!(message.contains("unit `blocks.0`"), "{message}");
        assert!(
            message.contains("is Sharded, but must be Unsharded"),
            "{message}"
        );
        assert!(message.contains("resharded while in use"), "{message}");
        // Everything is sharded again, and the next step works normally.
        assert_eq!(block.state(), UnitState::Sharded);
        assert!(!backward(model.loss(world.rank(), 0, &device), &model)?.is_empty());
        Ok(())
    });
}

#[test]
fn a_child_in_the_middle_of_a_step_is_not_taken_over() {
    on_ranks(2, |world| {
        let device = device();
        let mesh = ProcessMesh::new(&world, Mesh::line("shard", 2)?)?;
        let mut model = Mlp::new(&device);
        let block = super::bench::ready(|| Mlp::block(&device));
        let block = fully_shard(block, &mesh, ShardPolicy::new())?;
        let x = Tensor::<3>::ones([1, 2, 15], &device);
        let loss = block.forward(x).sum();
        model.blocks[0] = block.clone();
        let refused = fully_shard(model, &mesh, blocks()).err().map(text);
        let message = refused.unwrap_or_default();
        assert!(message.contains("in phase Forward"), "{message}");
        backward(loss, &block)?;
        Ok(())
    });
}

#[test]
fn submodules_have_their_own_norm() {
    on_ranks(3, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let all = grad_norm(&model, &gradients, Norm::default())?;
        let mut squares = grad_norm(&model.head, &gradients, Norm::default())?.powi(2);
        squares += grad_norm(&model.norm, &gradients, Norm::default())?.powi(2);
        squares += grad_norm(&model.embed, &gradients, Norm::default())?.powi(2);
        for block in &model.blocks {
            squares += grad_norm(block, &gradients, Norm::default())?.powi(2);
        }
        assert!(
            (squares.sqrt() - all).abs() <= 1e-12 * all,
            "{squares} {all}"
        );
        Ok(())
    });
}
