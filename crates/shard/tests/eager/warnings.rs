//! The warnings about a device that keeps full weights alive, at sharding and after running, and about an optimizer
//! that was not tried.

use std::fmt;
use std::sync::{Arc, Mutex};

use burn::optim::GradientsAccumulator;
use burn::tensor::Device;
use burn_fsdp_shard::{ShardPolicy, backward, check_elementwise, memory};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use super::bench::{build, device, on_ranks, optimizer};
use super::nets::MLP;

/// The texts of the warnings of one thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    fn texts(&self) -> Vec<String> {
        self.0.lock().map(|texts| texts.clone()).unwrap_or_default()
    }
}

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message"
            && let Ok(mut texts) = self.0.lock()
        {
            texts.push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target() == "burn_fsdp"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn missing_checkpointing_is_warned_about_at_sharding_and_once_per_unit() {
    let plain = || Device::flex().autodiff();
    for (device, warns) in [(plain as fn() -> Device, true), (device, false)] {
        on_ranks(2, move |world| {
            let heard = Warnings::default();
            let _heard = tracing::subscriber::set_default(heard.clone());
            let device = device();
            let policy = ShardPolicy::new().units(["blocks.*"]);
            let model = build(MLP, &world, &device, policy)?;
            let at_wrap = heard.texts();
            for step in 0..3 {
                backward(model.loss_of_row(world.rank(), step, &device), &model)?;
            }
            let after = &heard.texts()[at_wrap.len()..];
            if !warns {
                assert!(
                    at_wrap.is_empty() && after.is_empty(),
                    "{at_wrap:?} {after:?}"
                );
                return Ok(());
            }
            let text = at_wrap.join("\n");
            // The three matrices of each block.
            for part in [
                "blocks.0, blocks.1, blocks.2",
                &format!("{} bytes", 4 * 9 * 15 * 7),
                "gradient_checkpointing()",
            ] {
                assert!(text.contains(part), "{part} in {text}");
            }
            let pinned = memory(&model)?.pinned;
            let expected: Vec<_> = pinned.iter().map(ToString::to_string).collect();
            assert!(expected.len() >= 2, "{expected:?}");
            assert_eq!(after, expected);
            Ok(())
        });
    }
}

/// An accumulator drops the gradients for the optimizer's trial.
#[test]
fn an_optimizer_that_steps_untried_is_warned_of_once() {
    for is_checked in [false, true] {
        on_ranks(2, move |world| {
            let device = device();
            let mut model = build(MLP, &world, &device, ShardPolicy::new())?;
            let mut optim = optimizer();
            if is_checked {
                check_elementwise(&model, &optim)?;
            }
            let heard = Warnings::default();
            let _heard = tracing::subscriber::set_default(heard.clone());
            for step in 0..2 {
                let mut accumulator = GradientsAccumulator::new();
                let gradients = backward(model.loss(world.rank(), step, &device), &model)?;
                accumulator.accumulate(&model, gradients);
                model = optim.step(1e-2, model, accumulator.grads());
            }
            let texts = heard.texts();
            if is_checked {
                assert!(texts.is_empty(), "{texts:?}");
                return Ok(());
            }
            assert_eq!(texts.len(), 1, "{texts:?}");
            for part in [
                "the shard of `embed.weight` was updated",
                "`backward(loss, &model)`",
                "`check_elementwise(&model, &optimizer)`",
            ] {
                assert!(texts[0].contains(part), "{part} in {texts:?}");
            }
            Ok(())
        });
    }
}
