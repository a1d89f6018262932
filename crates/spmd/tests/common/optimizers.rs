//! Every optimizer of Burn that works per parameter, and some as users write them.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, AdjustLrFn, LambConfig,
    LionConfig, MuonConfig, Optimizer, RecordState, RmsPropConfig, SgdConfig, StateSink,
    StateSource,
};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_pack::Scalar;

/// The properties of its tensor that an optimizer needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Needs {
    /// None: every element is stepped separately, and the shape does not matter.
    Element,
    /// The shape of the parameter, on the host.
    Shape,
    /// All elements.
    Whole,
    /// A matrix, with all its elements.
    Matrix,
}

/// A check to run with every optimizer.
pub(crate) trait ForEach {
    fn case<O: Optimizer>(&mut self, name: &'static str, optimizer: O, rate: f64, needs: Needs);
}

/// Runs the check with every setting, and a learning rate for it.
pub(crate) fn for_each(each: &mut impl ForEach) {
    use Needs::{Element, Matrix, Shape, Whole};
    let decay = || Some(WeightDecayConfig::new(0.05));
    let momentum = MomentumConfig::new;
    let sgd = SgdConfig::new;
    each.case("sgd", sgd().build(), 0.1, Element);
    each.case(
        "sgd decay",
        sgd().with_weight_decay(decay()).build(),
        0.1,
        Element,
    );
    each.case(
        "sgd momentum",
        sgd().with_momentum(Some(momentum())).build(),
        0.1,
        Element,
    );
    let nesterov = sgd().with_momentum(Some(momentum().with_nesterov(true)));
    each.case(
        "sgd nesterov decay",
        nesterov.with_weight_decay(decay()).build(),
        0.1,
        Element,
    );
    let adam = AdamConfig::new;
    each.case("adam", adam().build(), 0.01, Element);
    each.case(
        "adam decay",
        adam().with_weight_decay(decay()).build(),
        0.01,
        Element,
    );
    each.case(
        "adam amsgrad",
        adam().with_amsgrad(true).build(),
        0.01,
        Element,
    );
    let adamw = || AdamWConfig::new().with_weight_decay(0.05);
    each.case("adamw", adamw().build(), 0.01, Element);
    each.case(
        "adamw cautious",
        adamw().with_cautious_weight_decay(true).build(),
        0.01,
        Element,
    );
    each.case(
        "adamw amsgrad",
        adamw().with_amsgrad(true).build(),
        0.01,
        Element,
    );
    each.case(
        "adagrad",
        AdaGradConfig::new().with_lr_decay(0.1).build(),
        0.05,
        Element,
    );
    let rms_prop = RmsPropConfig::new;
    each.case(
        "rmsprop",
        rms_prop().with_momentum(0.0).build(),
        0.01,
        Element,
    );
    each.case(
        "rmsprop momentum",
        rms_prop().with_momentum(0.9).build(),
        0.01,
        Element,
    );
    each.case(
        "rmsprop centered",
        rms_prop().with_centered(true).build(),
        0.01,
        Element,
    );
    each.case("lion", LionConfig::new().build(), 0.01, Element);
    each.case("adan", AdanConfig::new().build(), 0.01, Element);
    each.case(
        "lamb",
        LambConfig::new().with_weight_decay(0.05).build(),
        0.01,
        Whole,
    );
    each.case("adafactor", AdafactorConfig::new().build(), 0.01, Whole);
    let absolute = AdafactorConfig::new()
        .with_relative_step(false)
        .with_scale_parameter(false);
    each.case(
        "adafactor absolute",
        absolute.with_weight_decay(0.01).build(),
        0.01,
        Whole,
    );
    each.case("muon", MuonConfig::new().build(), 0.01, Matrix);
    let matched = MuonConfig::new().with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
    each.case("muon matched", matched.build(), 0.01, Matrix);
    each.case("a rate by the fan in", FanIn, 0.1, Shape);
    each.case("a sign by the shape", SignByShape, 0.01, Shape);
    each.case("other operations from step 6 on", Rectified, 0.05, Element);
    each.case("lookahead", Lookahead, 0.1, Element);
    each.case("f32 whatever the type", InF32, 0.1, Element);
    each.case("a sum of rates", SumOfRates, 0.1, Element);
    each.case("muon with a rest", MuonWithRest, 0.02, Whole);
}

/// A state of host numbers and tensors that are all saved.
#[derive(Clone, Default)]
pub(crate) struct Kept<const D: usize> {
    pub(crate) time: u64,
    pub(crate) sum: f64,
    pub(crate) tensors: Vec<Tensor<D>>,
}

impl<const D: usize> RecordState for Kept<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "time", Scalar::UInt(self.time));
        out.push_scalar(prefix, "sum", Scalar::Float(self.sum));
        for (index, tensor) in self.tensors.iter().enumerate() {
            out.push_tensor(prefix, &format!("tensor{index}"), tensor.to_data());
        }
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let Some(Scalar::UInt(time)) = source.take_scalar(prefix, "time") else {
            return None;
        };
        let Some(Scalar::Float(sum)) = source.take_scalar(prefix, "sum") else {
            return None;
        };
        let mut tensors = Vec::new();
        while let Some(data) = source.take_tensor(prefix, &format!("tensor{}", tensors.len())) {
            tensors.push(Tensor::from_data(data, device));
        }
        Some(Self { time, sum, tensors })
    }
}

/// Returns the next state with that tensor.
fn kept<const D: usize>(before: Option<&Kept<D>>, rate: f64, tensor: Tensor<D>) -> Option<Kept<D>> {
    Some(Kept {
        time: before.map_or(0, |kept| kept.time) + 1,
        sum: before.map_or(0.0, |kept| kept.sum) + rate,
        tensors: vec![tensor],
    })
}

/// Returns the momentum of the gradient.
fn momentum<const D: usize>(before: Option<&Kept<D>>, gradient: Tensor<D>) -> Tensor<D> {
    match before.and_then(|kept| kept.tensors.first().cloned()) {
        Some(tensor) => tensor.mul_scalar(0.9).add(gradient.mul_scalar(0.1)),
        None => gradient.mul_scalar(0.1),
    }
}

/// An optimizer with [`Kept`] as its state.
macro_rules! optimizer {
    ($(#[$doc:meta])* $name:ident, |$rate:ident, $tensor:ident, $gradient:ident, $kept:ident| $body:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub(crate) struct $name;

        impl Optimizer for $name {
            type State<const D: usize> = Kept<D>;

            fn step<const D: usize>(
                &self,
                $rate: f64,
                $tensor: Tensor<D>,
                $gradient: Tensor<D>,
                $kept: Option<Kept<D>>,
            ) -> (Tensor<D>, Option<Kept<D>>) {
                $body
            }

            fn to_device<const D: usize>(kept: Kept<D>, device: &Device) -> Kept<D> {
                let tensors = kept.tensors.into_iter();
                let tensors = tensors.map(|tensor| tensor.to_device(device)).collect();
                Kept { tensors, ..kept }
            }
        }
    };
}
optimizer!(
    /// A step that depends on the number of rows.
    FanIn,
    |rate, tensor, gradient, kept_before| {
        let moment = momentum(kept_before.as_ref(), gradient);
        let scale = rate / (tensor.dims()[0] as f64).sqrt();
        let next = tensor - moment.clone().mul_scalar(scale);
        (next, kept(kept_before.as_ref(), rate, moment))
    }
);

optimizer!(
    /// The sign of momentum, scaled by the longer side of a matrix.
    SignByShape,
    |rate, tensor, gradient, kept_before| {
        let moment = momentum(kept_before.as_ref(), gradient);
        let longest = tensor.dims().into_iter().max().unwrap_or(1) as f64;
        let next = tensor - moment.clone().sign().mul_scalar(0.2 * rate * longest.sqrt());
        (next, kept(kept_before.as_ref(), rate, moment))
    }
);

optimizer!(
    /// Other operations after enough steps, like RAdam's rectification.
    Rectified,
    |rate, tensor, gradient, kept_before| {
        let moment = momentum(kept_before.as_ref(), gradient.square());
        let time = kept_before.as_ref().map_or(0, |kept| kept.time) + 1;
        let delta = if time > 5 {
moment.clone().sqrt().mul_scalar(rate / time as f64)
} else {
moment.clone().mul_scalar(rate)
};
        (tensor - delta, kept(kept_before.as_ref(), rate, moment))
    }
);

optimizer!(
    /// Every fifth step goes halfway back to a slow copy.
    Lookahead,
    |rate, tensor, gradient, kept_before| {
        let slow = kept_before.as_ref().and_then(|kept| kept.tensors.first().cloned());
        let slow = slow.unwrap_or_else(|| tensor.clone());
        let fast = tensor - gradient.mul_scalar(rate);
        let time = kept_before.as_ref().map_or(0, |kept| kept.time) + 1;
        match time % 5 {
            0 => {
                let slow = (slow + fast).mul_scalar(0.5);
                (slow.clone(), kept(kept_before.as_ref(), rate, slow))
            }
            _ => (fast, kept(kept_before.as_ref(), rate, slow)),
        }
    }
);

optimizer!(
    /// Computes in f32, and keeps its state in f32.
    InF32,
    |rate, tensor, gradient, kept_before| {
        let dtype = tensor.dtype();
        let is_half = matches!(dtype, DType::BF16 | DType::F16);
        let (tensor, gradient) = if is_half {
(tensor.cast(FloatDType::F32), gradient.cast(FloatDType::F32))
} else {
(tensor, gradient)
};
        let moment = momentum(kept_before.as_ref(), gradient);
        let next = tensor.mul_scalar(0.999) - moment.clone().mul_scalar(rate);
        let next = if is_half {
next.cast(FloatDType::from(dtype))
} else {
next
};
        (next, kept(kept_before.as_ref(), rate, moment))
    }
);

optimizer!(
    /// Weighs a step by the sum of all rates so far, like schedule-free optimizers.
    SumOfRates,
    |rate, tensor, gradient, kept_before| {
        let moment = momentum(kept_before.as_ref(), gradient);
        let sum = kept_before.as_ref().map_or(0.0, |kept| kept.sum) + rate;
        let next = tensor - moment.clone().mul_scalar(rate * rate / sum.max(1e-3));
        (next, kept(kept_before.as_ref(), rate, moment))
    }
);

optimizer!(
    /// Muon for matrices, momentum for the rest.
    MuonWithRest,
    |rate, tensor, gradient, kept_before| {
        let moment = momentum(kept_before.as_ref(), gradient);
        let next = kept(kept_before.as_ref(), rate, moment.clone());
        let dims = tensor.dims();
        if dims.len() != 2 {
            return (tensor - moment.mul_scalar(rate), next);
        }
        let is_tall = dims[0] > dims[1];
        let mut x = if is_tall {
moment.swap_dims(0, 1)
} else {
moment
};
        let norm = x.clone().square().sum().sqrt().add_scalar(1e-7);
        x = x.div(norm.unsqueeze());
        for _ in 0..3 {
            let a = x.clone().matmul(x.clone().swap_dims(0, 1));
            let b = a.clone().mul_scalar(-4.775) + a.clone().matmul(a).mul_scalar(2.0315);
            x = x.clone().mul_scalar(3.4445) + b.matmul(x);
        }
        if is_tall {
            x = x.swap_dims(0, 1);
        }
        let scale = (dims[0] as f64 / dims[1] as f64).max(1.0).sqrt();
        (tensor - x.mul_scalar(rate * scale), next)
    }
);
