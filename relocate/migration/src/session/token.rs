//! The pairing token that a receiver prints and a sender is given.

use std::{fmt, str::FromStr};

use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use super::Error;

const PREFIX: &str = "mercury-receive-1-";
const SECRET: usize = 16;
const PIN: usize = 32;
const CHECK: usize = 4;
const BYTES: usize = SECRET + PIN + CHECK;
/// Context for deriving the sender's key.
const CONTEXT: &str = "mercury migration 1: the sender's Ed25519 key";
const ANNOUNCEMENT_CONTEXT: &str = "mercury migration 1: hails";
/// First bytes of a private key in PKCS #8 (RFC 8410, 7); the key's 32 bytes follow.
const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];

/// A pairing token: the receiver's identity, and the right to send to it. As text:
/// `mercury-receive-1-` and 104 hexadecimal digits.
#[derive(Clone, PartialEq, Eq)]
pub struct PairingToken {
    secret: [u8; SECRET],
    pin: [u8; PIN],
}

impl PairingToken {
    pub(super) fn new(secret: [u8; SECRET], certificate: &CertificateDer<'_>) -> Self {
        Self { secret, pin: pin(certificate) }
    }

    pub(super) fn is_pinned(&self, certificate: &CertificateDer<'_>) -> bool {
        self.pin == pin(certificate)
    }

    /// Returns the seed of the sender's key.
    pub(super) fn sender_seed(&self) -> [u8; 32] {
        blake3::derive_key(CONTEXT, &self.secret)
    }

    pub(super) fn sender_key(&self) -> PrivatePkcs8KeyDer<'static> {
        pkcs8(&self.sender_seed())
    }

    /// Returns the key of announcements for unknown attempts. The key of an attempt is derived from
    /// it too.
    pub(crate) fn announcement_key(&self) -> [u8; 32] {
        blake3::derive_key(ANNOUNCEMENT_CONTEXT, &self.secret)
    }
}

/// Returns an Ed25519 private key in PKCS #8.
pub(super) fn pkcs8(seed: &[u8; 32]) -> PrivatePkcs8KeyDer<'static> {
    PrivatePkcs8KeyDer::from([&PKCS8[..], seed].concat())
}

fn check(bytes: &[u8]) -> [u8; CHECK] {
    let mut check = [0; CHECK];
    check.copy_from_slice(&blake3::hash(bytes).as_bytes()[..CHECK]);
    check
}

/// Formats bytes as hexadecimal digits after a prefix, with a check at their end.
pub(super) fn checked(prefix: &str, bytes: &[u8]) -> String {
    let all = [bytes, &check(bytes)].concat();
    all.iter().fold(prefix.to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

/// Parses the text of [`checked`]; `None` if it has a mistake.
pub(super) fn unchecked<const BYTES: usize>(prefix: &str, text: &str) -> Option<[u8; BYTES]> {
    let bytes = hexadecimal(text.trim().strip_prefix(prefix)?)?;
    let (told, sum) = bytes.split_at_checked(BYTES)?;
    (check(told) == sum).then(|| told.try_into().ok()).flatten()
}

/// Returns the bytes that hexadecimal digits stand for.
fn hexadecimal(digits: &str) -> Option<Vec<u8>> {
    if !digits.len().is_multiple_of(2) || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()).collect()
}

fn pin(certificate: &CertificateDer<'_>) -> [u8; PIN] {
    *blake3::hash(certificate).as_bytes()
}

impl fmt::Display for PairingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&checked(PREFIX, &[&self.secret[..], &self.pin].concat()))
    }
}

/// Keeps the secret out of logs.
impl fmt::Debug for PairingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PairingToken(..)")
    }
}

impl FromStr for PairingToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(Error::PairingToken(
            "the text is no pairing token, which begins with mercury-receive-1-",
        ))?;
        let bytes = hexadecimal(digits).filter(|bytes| bytes.len() == BYTES);
        let bytes = bytes.ok_or(Error::PairingToken("the pairing token is not complete"))?;
        let (told, sum) = bytes.split_at(SECRET + PIN);
        if check(told) != sum {
            return Err(Error::PairingToken("the pairing token has a mistake in it"));
        }
        let mut token = Self { secret: [0; SECRET], pin: [0; PIN] };
        token.secret.copy_from_slice(&told[..SECRET]);
        token.pin.copy_from_slice(&told[SECRET..]);
        Ok(token)
    }
}
