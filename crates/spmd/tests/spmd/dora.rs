//! Weight-decomposed adapters (DoRA).

use burn::module::{Lora, Module, Param, ParamGroup, Reparameterization};
use burn::nn::LinearConfig;
use burn::tensor::{Device, Tensor};
use burn_fsdp_spmd::{DoraAdapter, LazyDora};

use crate::agreement::{agrees, vectors};
use crate::compiled::seeded;
use crate::frozen::{Initialized, Two};

#[test]
fn decomposed_adapters_train_while_their_base_is_frozen() {
    let _guard = seeded();
    let init = |device: &Device| {
        let of_a = Lora::new(3, 1.5).set_param_group(ParamGroup::from_predicate("a.weight"));
        let groups = LazyDora::new(Lora::new(2, 4.0)).and(of_a);
        let two = Two::new(device);
        // Otherwise Burn draws the weights and the factors in the order of their first use.
        two.visit(&mut Initialized);
        two.apply_reparameterization(groups)
    };
    agrees("decomposed adapters", init, Two::loss, vectors);
}

/// The formula, written out with numbers. Two multiples of a column have the same weight.
#[test]
fn decomposed_weights_have_the_magnitudes_as_norms() {
    let device = Device::flex();
    let weight = [[3.0_f32, 1.0, 0.0], [4.0, -1.0, 0.0]];
    let mut linear = LinearConfig::new(2, 3).init(&device);
    linear.weight = Param::from_data(weight, &device);
    let linear = linear.apply_reparameterization(LazyDora::new(Lora::new(1, 0.5)));
    let adapter = linear.weight.reparameterization::<DoraAdapter>();
    let mut adapter = adapter.expect("an adapter").clone();
    let data = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().expect("numbers");
    let root = 2.0_f32.sqrt();
    assert_eq!(
        data(adapter.magnitude.val()),
        [5.0, root, f32::MIN_POSITIVE]
    );
    adapter.a = Param::from_data([[1.0_f32], [2.0]], &device);
    adapter.b = Param::from_data([[6.0_f32, 8.0, 0.0]], &device);
    adapter.magnitude = Param::from_data([10.0_f32, 2.0, 3.0], &device);
    // The sums of the columns: (3, 4) + 3 * (1, 2) = (6, 10), (1, -1) + 4 * (1, 2) = (5, 7), and zero.
    let (of_first, of_second) = (10.0 / 136.0_f32.sqrt(), 2.0 / 74.0_f32.sqrt());
    let want = [
        6.0 * of_first,
        5.0 * of_second,
        0.0, //
        10.0 * of_first,
        7.0 * of_second,
        0.0,
    ];
    let got = data(
        adapter
            .apply(Tensor::<2>::from_data(weight, &device))
            .flatten(0, 1),
    );
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < 1e-5, "{got}, {want}");
    }
}
