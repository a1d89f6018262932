//! Random numbers for test cases (splitmix64).

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % limit as u64) as usize
    }

    pub(crate) fn text(&mut self, len: usize) -> String {
        const LETTERS: [char; 8] = ['a', 'b', 'c', ' ', '\n', '"', 'é', '漢'];
        (0..len)
            .map(|_| LETTERS[self.below(LETTERS.len())])
            .collect()
    }
}
