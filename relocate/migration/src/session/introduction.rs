//! Introductions: a machine that a receiver knows by its long-lived key is given the pairing token.
//!
//! Each machine has a [`MachineKey`], whose public half is its [`MachineName`]. A receiver has a list of the
//! names that it accepts, and the sender has the receiver's name. So both ends are authenticated by keys that
//! never leave their machines. Within a session of its own protocol the receiver tells the sender its pairing
//! token, which is made for one arrival. The sender then connects with the token, as an operator's would.
//!
//! The keys sign handshakes of TLS 1.3 only, in which the signatures of both ends differ by their context. So
//! a signature of one role or session is worth nothing in another.

use std::{
    fmt,
    io::{Read, Write},
    str::FromStr,
    sync::Arc,
    time::SystemTime,
};

use rcgen::KeyPair;
use ring::{
    rand::{SecureRandom, SystemRandom},
    signature::{Ed25519KeyPair, KeyPair as _},
};
use rustls::{ClientConfig, ServerConfig, ServerConnection, pki_types::PrivateKeyDer, server::Acceptor};

use super::{
    CLOCKS_DIFFER, Error, NOT_NOW, PairingToken, Receiver, TLS13, certificate, handshaken, local, provider,
    refused,
    token::{checked, pkcs8, unchecked},
    told,
    verify::{Pin, PinnedReceiver, PinnedSender},
    why_not_now,
};

/// Name of the protocol inside of TLS.
pub(super) const PROTOCOL: &[u8] = b"mercury-introduction/1";
const KEY_PREFIX: &str = "mercury-identity-1-";
const NAME_PREFIX: &str = "mercury-machine-1-";
/// Bytes of keys, public and private.
const KEY: usize = 32;
/// First byte of the receiver for a sender that it knows. A length and the pairing token follow.
const KNOWN: u8 = 3;

/// A machine's long-lived private key.
#[derive(Clone)]
pub struct MachineKey([u8; KEY]);

/// Keeps the key out of logs.
impl fmt::Debug for MachineKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MachineKey(..)")
    }
}

impl MachineKey {
    /// Makes a key.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn new() -> Result<Self, Error> {
        let mut seed = [0; KEY];
        SystemRandom::new().fill(&mut seed).map_err(local)?;
        Ok(Self(seed))
    }

    /// Returns the machine's name.
    ///
    /// # Errors
    /// The key cannot be used.
    pub fn name(&self) -> Result<MachineName, Error> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&self.0).map_err(local)?;
        let mut name = [0; KEY];
        name.copy_from_slice(pair.public_key().as_ref());
        Ok(MachineName(name))
    }

    /// Returns the key as text, for a file that only root reads.
    #[must_use]
    pub fn secret_text(&self) -> String {
        checked(KEY_PREFIX, &self.0)
    }

    fn certified(
        &self,
    ) -> Result<(rustls::pki_types::CertificateDer<'static>, PrivateKeyDer<'static>), Error> {
        let key = pkcs8(&self.0);
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&key, &rcgen::PKCS_ED25519).map_err(local)?;
        // It is made for this session alone.
        let certificate = certificate(&pair, SystemTime::now(), CLOCKS_DIFFER)?;
        Ok((certificate, PrivateKeyDer::from(key)))
    }
}

impl FromStr for MachineKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        unchecked(KEY_PREFIX, text).map(Self).ok_or(Error::PairingToken("the text is no machine's identity"))
    }
}

/// A machine's name: its public key. As text: `mercury-machine-1-` and 72 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineName([u8; KEY]);

impl MachineName {
    pub(super) fn key(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for MachineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&checked(NAME_PREFIX, &self.0))
    }
}

impl FromStr for MachineName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = "the text is no machine's name, which begins with mercury-machine-1-, or has a mistake";
        unchecked(NAME_PREFIX, text).map(Self).ok_or(Error::PairingToken(wrong))
    }
}

/// The receiver's part: its key, and the machines that are given the pairing token.
#[derive(Clone, Debug)]
pub struct Introducer {
    /// Key of this machine.
    pub key: MachineKey,
    /// Machines that it knows.
    pub sources: Vec<MachineName>,
}

impl Introducer {
    fn config(&self) -> Result<Arc<ServerConfig>, Error> {
        let (certificate, key) = self.key.certified()?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(local)?
            .with_client_cert_verifier(Arc::new(PinnedSender::known(&self.sources, provider())))
            .with_single_cert(vec![certificate], key)
            .map_err(local)?;
        super::prepare_server(&mut config, PROTOCOL);
        Ok(Arc::new(config))
    }
}

/// Reads a sender's first message, and begins the session that it asks for: an introduction, or the
/// receiver's own.
pub(super) fn begin(
    receiver: &Receiver,
    introducer: &Introducer,
    socket: &mut (impl Read + Write),
) -> Result<(ServerConnection, bool), Error> {
    let mut acceptor = Acceptor::default();
    let accepted = loop {
        if acceptor.read_tls(socket).map_err(Error::Refused)? == 0 {
            return Err(refused("it has closed the connection"));
        }
        match acceptor.accept() {
            Ok(Some(accepted)) => break accepted,
            Ok(None) => {}
            Err((error, mut alert)) => {
                let _ = alert.write_all(socket);
                return Err(Error::Refused(std::io::Error::other(error)));
            }
        }
    };
    let hello = accepted.client_hello();
    let asks = hello.alpn().is_some_and(|mut protocols| protocols.any(|protocol| protocol == PROTOCOL));
    let config = if asks { introducer.config()? } else { Arc::clone(&receiver.config) };
    let connection = accepted.into_connection(config).map_err(|(error, mut alert)| {
        let _ = alert.write_all(socket);
        Error::Refused(std::io::Error::other(error))
    })?;
    Ok((connection, asks))
}

/// Returns the receiver's answer to a sender that it knows.
pub(super) fn answer(token: &PairingToken, not_now: Option<&str>) -> Vec<u8> {
    match not_now {
        Some(why) => told(NOT_NOW, why),
        None => told(KNOWN, &token.to_string()),
    }
}

/// Asks a receiver for its pairing token.
///
/// # Errors
/// The receiver is not the machine of this name, does not know this one, or receives another machine.
pub fn ask<S: Read + Write>(
    key: &MachineKey,
    name: &MachineName,
    mut socket: S,
) -> Result<PairingToken, Error> {
    let (certificate, private) = key.certified()?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(local)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedReceiver::new(Pin::Machine(*name), provider())))
        .with_client_auth_cert(vec![certificate], private)
        .map_err(local)?;
    super::prepare(&mut config, PROTOCOL);
    let connection = handshaken(config, &mut socket, PROTOCOL)?;
    let mut session = rustls::StreamOwned::new(connection, socket);
    let mut first = [0];
    session.read_exact(&mut first).map_err(Error::Refused)?;
    let text = why_not_now(&mut session).map_err(Error::Refused)?;
    match first[0] {
        KNOWN => text.parse(),
        NOT_NOW => Err(Error::NotNow(text)),
        _ => Err(refused("it does not say that it knows this machine")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{HOUR, pair};
    use super::*;
    use std::{os::unix::net::UnixStream, thread};

    fn key() -> MachineKey {
        MachineKey::new().expect("a key")
    }

    fn name(key: &MachineKey) -> MachineName {
        key.name().expect("a name")
    }

    /// Makes a receiver with an introducer that knows these machines.
    fn receiver(own: &MachineKey, sources: &[&MachineKey]) -> Receiver {
        let (receiver, _) = Receiver::new(HOUR).expect("a receiver");
        let sources = sources.iter().map(|key| name(key)).collect();
        receiver.introducing(Introducer { key: own.clone(), sources })
    }

    /// Returns the outcomes of both ends when a client does `asks` at a receiver that does `answers`.
    fn meet<T: Send, U: Send>(
        asks: impl FnOnce(UnixStream) -> T + Send,
        answers: impl FnOnce(UnixStream) -> U + Send,
    ) -> (T, U) {
        let (near, far) = pair();
        thread::scope(|scope| {
            let asked = scope.spawn(move || asks(near));
            let answered = answers(far);
            (asked.join().expect("no panic"), answered)
        })
    }

    #[test]
    fn a_known_machine_is_given_the_token_and_is_let_in_with_it() {
        let (own, source) = (key(), key());
        let receiver = receiver(&own, &[&key(), &source]);
        let (token, answered) =
            meet(|socket| ask(&source, &name(&own), socket), |socket| receiver.accept(socket).map(drop));
        assert!(matches!(answered, Err(Error::Introduced)), "{answered:?}");
        let token = token.expect("a token");
        assert_eq!(&token, receiver.token());
        let (sent, received) = meet(
            |socket| super::super::connect(&token, socket).map(drop),
            |socket| receiver.accept(socket).map(drop),
        );
        assert!(sent.is_ok() && received.is_ok(), "{sent:?} {received:?}");
    }

    #[test]
    fn a_stranger_is_told_nothing() {
        let own = key();
        let receiver = receiver(&own, &[&key()]);
        let stranger = key();
        let (token, answered) =
            meet(|socket| ask(&stranger, &name(&own), socket), |socket| receiver.accept(socket).map(drop));
        let error = answered.expect_err("refused").to_string();
        assert!(error.contains("certificate"), "{error}");
        assert!(token.is_err(), "{token:?}");
        // Nor is one when the receiver turns machines away.
        let (token, _) =
            meet(|socket| ask(&stranger, &name(&own), socket), |socket| receiver.turn_away(socket, "taken"));
        assert!(!matches!(token, Ok(_) | Err(Error::NotNow(_))), "{token:?}");
    }

    #[test]
    fn another_receiver_learns_nothing() {
        let (own, other, source) = (key(), key(), key());
        // The other one knows the source, too, and has not the key of the one that is meant.
        let receiver = receiver(&other, &[&source]);
        let (token, _) =
            meet(|socket| ask(&source, &name(&own), socket), |socket| receiver.accept(socket).map(drop));
        let error = token.expect_err("refused").to_string();
        assert!(error.contains("certificate"), "{error}");
    }

    #[test]
    fn a_receiver_that_is_taken_says_so_to_machines_that_it_knows() {
        let (own, source) = (key(), key());
        let receiver = receiver(&own, &[&source]);
        let (token, _) =
            meet(|socket| ask(&source, &name(&own), socket), |socket| receiver.turn_away(socket, "taken"));
        assert!(matches!(&token, Err(Error::NotNow(why)) if why == "taken"), "{token:?}");
        // It is told no token either while the machine that has one may come back.
        let (token, answered) = meet(
            |socket| ask(&source, &name(&own), socket),
            |socket| receiver.accept_holder(socket, "taken").map(drop),
        );
        assert!(matches!(&token, Err(Error::NotNow(why)) if why == "taken"), "{token:?}");
        assert!(matches!(answered, Err(Error::NotNow(_))), "{answered:?}");
    }

    #[test]
    fn without_an_introducer_there_are_no_introductions() {
        let (own, source) = (key(), key());
        let (receiver, _) = Receiver::new(HOUR).expect("a receiver");
        let (token, _) =
            meet(|socket| ask(&source, &name(&own), socket), |socket| receiver.accept(socket).map(drop));
        assert!(token.is_err());
    }

    /// The protocols do not mix: neither a token's key introduces, nor does a machine's key send.
    #[test]
    fn keys_are_good_for_their_own_protocol_alone() {
        let (own, source) = (key(), key());
        let receiver = receiver(&own, &[&source]);
        let token = receiver.token().clone();
        let mut config = super::super::sender(&token, SystemTime::now()).expect("a sender");
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        let (said, answered) = meet(
            |mut socket| handshaken(config, &mut socket, PROTOCOL).map(drop),
            |socket| receiver.accept(socket).map(drop),
        );
        assert!(said.is_err() && answered.is_err(), "{said:?} {answered:?}");
        let (certificate, private) = source.certified().expect("a certificate");
        let mut config = super::super::builder(&token)
            .expect("a builder")
            .with_client_auth_cert(vec![certificate], private)
            .expect("a sender");
        super::super::prepare(&mut config, super::super::PROTOCOL);
        let (said, answered) = meet(
            |socket| super::super::connect_with(config, socket).map(drop),
            |socket| receiver.accept(socket).map(drop),
        );
        assert!(said.is_err() && answered.is_err(), "{said:?} {answered:?}");
    }

    #[test]
    fn a_sender_with_the_token_needs_no_introduction() {
        let receiver = receiver(&key(), &[]);
        let token = receiver.token().clone();
        let (sent, received) = meet(
            |socket| super::super::connect(&token, socket).map(drop),
            |socket| receiver.accept(socket).map(drop),
        );
        assert!(sent.is_ok() && received.is_ok(), "{sent:?} {received:?}");
        // Noise is refused, and does not keep the receiver.
        let (_, noise) = meet(
            |mut socket| socket.write_all(b"GET / HTTP/1.0\r\n\r\n").map(drop),
            |socket| receiver.accept(socket).map(drop),
        );
        assert!(noise.is_err());
    }

    #[test]
    fn mistakes_in_names_and_keys_are_found() {
        let key = key();
        let (name, secret) = (name(&key).to_string(), key.secret_text());
        assert_eq!(name.parse::<MachineName>().expect("a name"), key.name().expect("a name"));
        assert_eq!(secret.parse::<MachineKey>().expect("a key").secret_text(), secret);
        assert_eq!(format!("{key:?}"), "MachineKey(..)");
        for at in 0..name.len() {
            let mut bytes = name.clone().into_bytes();
            bytes[at] = if bytes[at] == b'3' { b'4' } else { b'3' };
            let wrong = String::from_utf8(bytes).expect("text");
            assert!(wrong.parse::<MachineName>().is_err(), "{wrong}");
            assert!(name[..at].parse::<MachineName>().is_err());
        }
        for wrong in [&secret, "", "mercury-machine-1-é", "mercury-machine-1-+1"] {
            assert!(wrong.parse::<MachineName>().is_err(), "{wrong}");
        }
        assert!(name.parse::<MachineKey>().is_err());
    }
}
