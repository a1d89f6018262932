//! Loss scaling agreed among the ranks.

use burn_fsdp_collectives::{CommCounter, OperationKind};
use burn_fsdp_shard::{LossScaler, LossScalerState, LossScaling, ShardPolicy, backward};

use super::bench::{
    Outcome, assert_close, build, device, on_ranks, optimizer, plainly, whole_params,
};
use super::gradients::{one_step, spoil, values};
use super::nets::MLP;

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

#[test]
fn scaling_and_unscaling_changes_nothing() {
    for ranks in 1..=3 {
        let want = plainly(MLP, ranks, 5);
        let outcomes = on_ranks(ranks, |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, blocks())?;
            let (mut optim, mut scaler) = (optimizer(), LossScaler::default());
            let mut losses = Vec::new();
            for step in 0..5 {
                let loss = (MLP.loss)(&model, world.rank(), step, &device);
                losses.push(loss.clone().into_scalar::<f32>());
                let gradients = backward(scaler.scale(loss), &model)?;
                let gradients = scaler.unscale(&model, gradients)?.expect("no overflow");
                model = optim.step(1e-2, model, gradients);
            }
            let params = whole_params((MLP.build)(&device), &model);
            Ok(Outcome { losses, params })
        });
        let mut got = outcomes[0].clone();
        for (step, loss) in got.losses.iter_mut().enumerate() {
            let sum: f32 = outcomes.iter().map(|outcome| outcome.losses[step]).sum();
            *loss = sum / ranks as f32;
        }
        assert_close(&got, &want, 1e-5);
    }
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let seen = on_ranks(3, move |world| {
            let (model, mut gradients) = one_step(&world, blocks())?;
            if world.rank() == 2 {
                spoil(&model, &mut gradients, value);
            }
            let mut scaler = LossScaler::default();
            let counter = CommCounter::new([&world]);
            let skipped = scaler.unscale(&model, gradients)?.is_none();
            counter.expect(&[(OperationKind::AllReduce, 1)]);
            Ok((skipped, scaler.state()))
        });
        for seen in seen {
            let state = LossScalerState {
                scale: 32768.0,
                growth_tracker: 0,
            };
            assert_eq!(seen, (true, state), "{value}");
        }
    }
}

#[test]
fn the_scale_grows_after_the_interval_and_the_state_goes_through_a_checkpoint() {
    on_ranks(2, |world| {
        let (model, gradients) = one_step(&world, blocks())?;
        let scaling = LossScaling {
            initial_scale: 8.0,
            growth_interval: 3,
            ..LossScaling::default()
        };
        let mut scaler = LossScaler::new(scaling)?;
        let before = values(&model, &gradients);
        let mut gradients = gradients;
        let mut scales = Vec::new();
        for _ in 0..7 {
            scales.push(scaler.state().scale);
            gradients = scaler.unscale(&model, gradients)?.expect("finite");
            let text = serde_json::to_string(&scaler.state()).expect("plain numbers");
            let state = serde_json::from_str(&text).expect("what was written");
            scaler = LossScaler::new(scaling)?.restored(state);
        }
        assert_eq!(scales, [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0]);
        let divided: f64 = scales.iter().product();
        let after = values(&model, &gradients);
        for ((path, before), (_, after)) in before.iter().zip(&after) {
            for (before, after) in before.iter().zip(after) {
                // Powers of two cost no bits.
                let want = (f64::from(*before) / divided) as f32;
                assert_eq!(*after, want, "{path}");
            }
        }
        Ok(())
    });
}

#[test]
fn a_vanished_scale_is_an_error() {
    on_ranks(1, |world| {
        let (model, _) = one_step(&world, blocks())?;
        let state = LossScalerState {
            scale: 1.2e-38,
            growth_tracker: 0,
        };
        let mut scaler = LossScaler::default().restored(state);
        let (_, mut gradients) = one_step(&world, blocks())?;
        spoil(&model, &mut gradients, f32::NAN);
        // Gradients of another module do not belong to this one.
        assert!(scaler.unscale(&model, gradients)?.is_some());
        let (model, mut gradients) = one_step(&world, blocks())?;
        spoil(&model, &mut gradients, f32::NAN);
        let error = scaler.unscale(&model, gradients).expect_err("too small");
        assert!(error.to_string().contains("1.2e-38"), "{error}");
        assert!(error.to_string().contains("bf16"), "{error}");
        Ok(())
    });
}

#[test]
fn invalid_options_are_rejected() {
    let refusal = |scaling| LossScaler::new(scaling).expect_err("refused").to_string();
    let initial_scale = refusal(LossScaling {
        initial_scale: 0.0,
        ..LossScaling::default()
    });
    assert!(
        initial_scale.contains("initial_scale is 0"),
        "{initial_scale}"
    );
    let growth = refusal(LossScaling {
        growth_factor: 1.0,
        ..LossScaling::default()
    });
    assert!(growth.contains("above 1"), "{growth}");
    let backoff = refusal(LossScaling {
        backoff_factor: 1.0,
        ..LossScaling::default()
    });
    assert!(backoff.contains("between 0 and 1"), "{backoff}");
    let interval = refusal(LossScaling {
        growth_interval: 0,
        ..LossScaling::default()
    });
    assert!(interval.contains("growth_interval"), "{interval}");
}
