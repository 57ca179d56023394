//! Amounts of memory as people say them: `512M`, `4G`, or a number of mebibytes.

use std::{ops::RangeInclusive, str::FromStr};

/// Units by their first letter, in mebibytes.
const UNITS: [(char, u64); 3] = [('M', 1), ('G', 1 << 10), ('T', 1 << 20)];

/// Makes a parser for an option whose value is an amount in this range, in mebibytes.
pub fn mebibytes(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let amount = read(text).ok_or_else(|| {
            "an amount is a number of MiB, or has a unit: 512M, 4G, 1T (M is 1024 × 1024 bytes)".to_owned()
        })?;
        if range.contains(&amount) {
            return Ok(amount);
        }
        Err(format!("it has to be from {} to {}", say(*range.start()), say(*range.end())))
    }
}

fn read(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let mut letters = unit.chars();
    let factor = match letters.next() {
        None => 1,
        Some(letter) => UNITS.iter().find(|(name, _)| *name == letter.to_ascii_uppercase())?.1,
    };
    // `M` and `MiB` are the same. `MB` is ambiguous, so it is refused.
    let is_known = matches!(letters.as_str(), "" | "iB" | "ib");
    u64::from_str(number).ok().filter(|_| is_known)?.checked_mul(factor)
}

/// Formats an amount in the largest unit that leaves a whole number.
fn say(amount: u64) -> String {
    let fits = |(_, factor): &&(char, u64)| amount.is_multiple_of(*factor);
    let (unit, factor) = UNITS.iter().rev().find(fits).copied().unwrap_or(UNITS[0]);
    format!("{}{unit}", amount / factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn amounts_are_read_with_and_without_units() {
        let parse = mebibytes(1..=1 << 24);
        for (text, amount) in [("512", 512), ("512M", 512), ("512MiB", 512), ("4g", 4096), ("2T", 2 << 20)] {
            assert_eq!(parse(text), Ok(amount), "{text}");
        }
        for text in [
            "",
            "M",
            "10X",
            "10MB",
            "10Mbit",
            "1.5G",
            "-1",
            "+1",
            "1 G",
            "99999999999999999999",
            "17592186044416T",
        ] {
            assert!(parse(text).is_err_and(|error| error.contains("512M, 4G")), "{text}");
        }
    }

    #[test]
    fn a_size_out_of_range_is_refused_with_the_range() {
        let parse = mebibytes(64..=1 << 20);
        assert_eq!(parse("63"), Err("it has to be from 64M to 1T".to_owned()));
        assert_eq!(parse("2T"), Err("it has to be from 64M to 1T".to_owned()));
        assert_eq!(mebibytes(1..=1536)("0"), Err("it has to be from 1M to 1536M".to_owned()));
    }

    proptest! {
        #[test]
        fn printed_sizes_are_parsed_back(amount in 1..=1_u64 << 30) {
            prop_assert_eq!(read(&say(amount)), Some(amount));
            prop_assert_eq!(read(&amount.to_string()), Some(amount));
        }

        #[test]
        fn anything_is_an_amount_or_refused(text in ".{0,12}") {
            let _ = mebibytes(1..=1 << 24)(&text);
        }
    }
}
