//! Bytes as hexadecimal digits in the description of a machine.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    parse(&text).ok_or_else(|| D::Error::custom("bytes are not in hexadecimal"))
}

fn parse(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pair = |pair: &[u8]| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pairs_of_digits_are_bytes() {
        assert_eq!(parse("00fF7a"), Some(vec![0, 0xFF, 0x7A]));
        assert_eq!(parse(""), Some(Vec::new()));
        for wrong in ["0", "000", "0g", "-1", "+1", "ä"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
