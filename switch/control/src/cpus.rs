//! Sets of CPUs in the kernel's own notation: `0-3,8,12-15`.

use std::{collections::BTreeSet, fmt, str::FromStr};

/// Limit of Linux: it runs on no more than this many CPUs (NR_CPUS of x86).
const MAX_CPUS: u32 = 8192;

/// A set of Linux CPU numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Returns true if `cpu` is in the set.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Returns the CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Returns the number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the set as a bit mask in 64-bit words, for the driver.
    #[must_use]
    pub fn mask(&self) -> Vec<u64> {
        let words = self.0.last().map_or(0, |last| *last as usize / 64 + 1);
        let mut mask = vec![0; words];
        for cpu in self.iter() {
            if let Some(word) = mask.get_mut(cpu as usize / 64) {
                *word |= 1 << (cpu % 64);
            }
        }
        mask
    }

    /// Returns the CPUs as maximal runs.
    fn runs(&self) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => runs.push((cpu, cpu)),
            }
        }
        runs
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cpus = BTreeSet::new();
        for item in text.trim().split(',') {
            let (first, last) = range(item.trim())?;
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

fn range(item: &str) -> Result<(u32, u32), String> {
    let (first, last) = item.split_once('-').unwrap_or((item, item));
    let (first, last) = (number(first, item)?, number(last, item)?);
    if first > last {
        return Err(format!("`{item}` runs backwards"));
    }
    Ok((first, last))
}

fn number(text: &str, item: &str) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(cpu) if digits && cpu < MAX_CPUS => Ok(cpu),
        Ok(_) if digits => Err(format!("`{item}`: CPU numbers end at {}", MAX_CPUS - 1)),
        _ => Err(format!("`{item}` is not a CPU or a range of CPUs; write a list like 0-3,8")),
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.runs().into_iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        text.parse().expect(text)
    }

    #[test]
    fn lists() {
        assert_eq!(set("0-3,8").iter().collect::<Vec<_>>(), [0, 1, 2, 3, 8]);
        assert_eq!(set("8,0-1,1").to_string(), "0-1,8");
        assert_eq!(set(" 5 \n").to_string(), "5");
        assert_eq!(set("0,64").mask(), [1, 1]);
        assert!(CpuSet::default().mask().is_empty());
    }

    #[test]
    fn nonsense() {
        for text in ["", ",", "1,", "-", "3-", "-3", "a", "1-2-3", "+1", "4294967296", "8192", "0-4294967295"]
        {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
        assert_eq!("5-3".parse::<CpuSet>(), Err("`5-3` runs backwards".into()));
    }

    proptest! {
        #[test]
        fn printed_cpu_sets_are_parsed_back(cpus in proptest::collection::btree_set(0..300_u32, 1..40)) {
            let cpus: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(set(&cpus.to_string()), cpus);
        }

        #[test]
        fn the_mask_has_the_same_cpus(cpus in proptest::collection::btree_set(0..300_u32, 1..40)) {
            let cpus: CpuSet = cpus.into_iter().collect();
            let mask = cpus.mask();
            let bit = |cpu: u32| mask.get(cpu as usize / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0);
            prop_assert!((0..400).all(|cpu| bit(cpu) == cpus.contains(cpu)));
        }

        #[test]
        fn no_text_panics(text in ".*") {
            let _ = text.parse::<CpuSet>();
        }

        #[test]
        fn nothing_like_a_list_panics(text in "[0-9,-]{0,20}") {
            let _ = text.parse::<CpuSet>();
        }
    }
}
