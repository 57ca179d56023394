//! The session: TLS 1.3, with both ends authenticated by one pairing token.
//!
//! `mercury receive` prints a [`PairingToken`], the token, and `mercury migrate` is given it. The token
//! holds the hash of the receiver's certificate, which is made for this one arrival, and a secret.
//! Both ends derive the sender's key pair from the secret. So the sender talks to that receiver
//! alone, and the receiver accepts only a sender that was given the token. A reader of the token
//! can send a machine to the receiver, but cannot read or change another sender's data.
//!
//! Sessions are never resumed and there is no early data, so that a message of one session is worth
//! nothing in another. Neither end sees a byte of payload before both are authenticated.
//! [`Receiver::accept`] and [`connect`] return after the handshake, and after the receiver has
//! confirmed it inside of the session.

mod introduction;
mod token;
mod verify;

pub use introduction::{Introducer, MachineKey, MachineName, ask};
pub use token::PairingToken;

use std::{
    fmt,
    io::{self, Read, Write},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{CertificateParams, KeyPair};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::{
    ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned,
    client::Resumption,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
    server::NoServerSessionStorage,
    version::TLS13,
};

use verify::{Pin, PinnedReceiver, PinnedSender};

/// Name of the protocol inside of TLS. Ends of different versions fail before an offer. Version 2
/// added the secret for announcements, 3 the number of streams, 4 the disks that go along.
const PROTOCOL: &[u8] = b"mercury-migration/4";
/// Label for deriving a session's binding.
const BINDING: &[u8] = b"EXPORTER-mercury-migration-stream";
/// Name in certificates. It is not checked; the pin is.
const NAME: &str = "mercury-receive";
/// First byte of the receiver, which confirms that it accepts the sender.
const WELCOME: u8 = 1;
/// First byte of the receiver for a sender with the token that it does not accept now. A length and
/// the reason follow.
const NOT_NOW: u8 = 2;
/// Largest difference between the clocks of two machines.
const CLOCKS_DIFFER: Duration = Duration::from_secs(24 * 3600);

/// The reason why there is no session.
#[derive(Debug)]
pub enum Error {
    /// The text is no pairing token.
    PairingToken(&'static str),
    /// The other end is not the expected one, or does not speak this protocol.
    Refused(io::Error),
    /// The other end is the expected one, and does not accept this sender now. The reason follows.
    NotNow(String),
    /// The other end was given the pairing token in an introduction, and will connect with it.
    Introduced,
    /// Something failed at this end: random numbers or certificates.
    Local(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PairingToken(why) => f.write_str(why),
            // TLS's own text here is for programmers.
            Self::Refused(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("no session with the other machine: it has closed the connection")
            }
            Self::Refused(error) => write!(f, "no session with the other machine: {error}"),
            Self::NotNow(why) => write!(f, "the destination does not accept this machine now: {why}"),
            Self::Introduced => {
                f.write_str("only for now: it is known, and was given the pairing token to come again with")
            }
            Self::Local(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Error {}

fn local(error: impl fmt::Display) -> Error {
    Error::Local(error.to_string())
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The end that receives a machine.
#[derive(Clone, Debug)]
pub struct Receiver {
    config: Arc<ServerConfig>,
    token: PairingToken,
    introducer: Option<Introducer>,
}

/// A receiver's identity, to be carried to the place of the reception. Its holder is that receiver.
#[derive(Clone)]
pub struct Identity {
    secret: [u8; 16],
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Keeps the key out of logs.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

impl Identity {
    /// Makes an identity and its pairing token, both valid for `lifetime`.
    ///
    /// # Errors
    /// There are no random numbers, or no certificate can be made.
    pub fn new(now: SystemTime, lifetime: Duration) -> Result<(Self, PairingToken), Error> {
        let key = KeyPair::generate_for(&rcgen::PKCS_ED25519).map_err(local)?;
        let certificate = certificate(&key, now, lifetime)?;
        let mut secret = [0; 16];
        SystemRandom::new().fill(&mut secret).map_err(local)?;
        let token = PairingToken::new(secret, &certificate);
        Ok((Self { secret, certificate: certificate.to_vec(), key: key.serialize_der() }, token))
    }

    /// Returns the identity as bytes: the secret, the length of the certificate (4 bytes,
    /// little-endian), the certificate, and the key.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let length = (self.certificate.len() as u32).to_le_bytes();
        [&self.secret[..], &length, &self.certificate, &self.key].concat()
    }

    /// Parses the bytes of [`Self::to_bytes`].
    ///
    /// # Errors
    /// The bytes are no identity.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let none = || Error::Local("these bytes are no receiver's identity".into());
        let (secret, rest) = bytes.split_first_chunk::<16>().ok_or_else(none)?;
        let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(none)?;
        let (certificate, key) =
            rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(none)?;
        Ok(Self { secret: *secret, certificate: certificate.to_vec(), key: key.to_vec() })
    }
}

impl Receiver {
    /// Makes a receiver with a certificate of its own, and the pairing token for the sender. Both
    /// are valid for `lifetime`.
    ///
    /// # Errors
    /// There are no random numbers, or no certificate can be made.
    pub fn new(lifetime: Duration) -> Result<(Self, PairingToken), Error> {
        Self::at(SystemTime::now(), lifetime)
    }

    /// Makes the same at another time.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at(now: SystemTime, lifetime: Duration) -> Result<(Self, PairingToken), Error> {
        let (identity, token) = Identity::new(now, lifetime)?;
        Ok((Self::with(&identity)?, token))
    }

    /// Returns the receiver with an identity.
    ///
    /// # Errors
    /// The identity is invalid.
    pub fn with(identity: &Identity) -> Result<Self, Error> {
        let certificate = CertificateDer::from(identity.certificate.clone());
        let token = PairingToken::new(identity.secret, &certificate);
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(identity.key.clone()));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(local)?
            .with_client_cert_verifier(Arc::new(PinnedSender::new(&token, provider())?))
            .with_single_cert(vec![certificate], key)
            .map_err(local)?;
        prepare_server(&mut config, PROTOCOL);
        Ok(Self { config: Arc::new(config), token, introducer: None })
    }

    /// Tells the pairing token to machines that the introducer knows.
    #[must_use]
    pub fn introducing(self, introducer: Introducer) -> Self {
        Self { introducer: Some(introducer), ..self }
    }

    /// Returns the receiver's pairing token.
    #[must_use]
    pub fn token(&self) -> &PairingToken {
        &self.token
    }

    /// Accepts a sender, or refuses it. The socket limits the time that this may take.
    ///
    /// # Errors
    /// The sender was not given the token, or is given it now in an introduction.
    pub fn accept<S: Read + Write>(&self, socket: S) -> Result<StreamOwned<ServerConnection, S>, Error> {
        self.answer(socket, None, None)
    }

    /// Accepts a connection of a sender that has the token. A sender that asks for the token is told the
    /// reason, of at most 255 bytes, why it is not accepted now.
    ///
    /// # Errors
    /// As for [`Self::accept`], and [`Error::NotNow`] if the sender has asked for the token.
    pub fn accept_holder<S: Read + Write>(
        &self,
        socket: S,
        why: &str,
    ) -> Result<StreamOwned<ServerConnection, S>, Error> {
        self.answer(socket, None, Some(why))
    }

    /// Tells a sender that it is not accepted now, with a reason of at most 255 bytes.
    ///
    /// # Errors
    /// The sender was not given the token. Then it is told nothing.
    pub fn turn_away<S: Read + Write>(&self, socket: S, why: &str) -> Result<(), Error> {
        match self.answer(socket, Some(why), Some(why)) {
            Ok(_) | Err(Error::NotNow(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn answer<S: Read + Write>(
        &self,
        mut socket: S,
        not_now: Option<&str>,
        no_token: Option<&str>,
    ) -> Result<StreamOwned<ServerConnection, S>, Error> {
        let (mut connection, asks) = match &self.introducer {
            Some(introducer) => introduction::begin(self, introducer, &mut socket)?,
            None => (ServerConnection::new(Arc::clone(&self.config)).map_err(local)?, false),
        };
        while connection.is_handshaking() {
            connection.complete_io(&mut socket).map_err(Error::Refused)?;
        }
        let protocol = if asks { introduction::PROTOCOL } else { PROTOCOL };
        known(protocol, connection.alpn_protocol(), connection.peer_certificates())?;
        let answer = match (asks, not_now) {
            (true, _) => introduction::answer(&self.token, no_token),
            (false, Some(why)) => told(NOT_NOW, why),
            (false, None) => vec![WELCOME],
        };
        let mut session = StreamOwned::new(connection, socket);
        session.write_all(&answer).and_then(|()| session.flush()).map_err(Error::Refused)?;
        match no_token {
            _ if !asks => Ok(session),
            None => Err(Error::Introduced),
            Some(why) => Err(Error::NotNow(why.to_owned())),
        }
    }
}

/// Returns an answer with a text of at most 255 bytes.
fn told(first: u8, text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(usize::from(u8::MAX))];
    [&[first, text.len() as u8], text].concat()
}

fn prepare_server(config: &mut ServerConfig, protocol: &[u8]) {
    config.alpn_protocols = vec![protocol.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
}

/// Connects to the receiver that has printed the pairing token.
///
/// # Errors
/// The receiver is another one, or does not accept this sender.
pub fn connect<S: Read + Write>(
    token: &PairingToken,
    socket: S,
) -> Result<StreamOwned<ClientConnection, S>, Error> {
    connect_with(sender(token, SystemTime::now())?, socket)
}

fn sender(token: &PairingToken, now: SystemTime) -> Result<ClientConfig, Error> {
    let key = token.sender_key();
    let pair = KeyPair::from_pkcs8_der_and_sign_algo(&key, &rcgen::PKCS_ED25519).map_err(local)?;
    let certificate = certificate(&pair, now, CLOCKS_DIFFER)?;
    let mut config =
        builder(token)?.with_client_auth_cert(vec![certificate], PrivateKeyDer::from(key)).map_err(local)?;
    prepare(&mut config, PROTOCOL);
    Ok(config)
}

fn builder(
    token: &PairingToken,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, Error> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(local)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedReceiver::new(
            Pin::Token(token.clone()),
            provider(),
        )));
    Ok(builder)
}

fn prepare(config: &mut ClientConfig, protocol: &[u8]) {
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
}

fn connect_with<S: Read + Write>(
    config: ClientConfig,
    mut socket: S,
) -> Result<StreamOwned<ClientConnection, S>, Error> {
    let connection = handshaken(config, &mut socket, PROTOCOL)?;
    let mut session = StreamOwned::new(connection, socket);
    // Only the receiver's first byte tells if it has accepted this sender.
    let mut answer = [0];
    session.read_exact(&mut answer).map_err(Error::Refused)?;
    match answer[0] {
        WELCOME => Ok(session),
        NOT_NOW => Err(why_not_now(&mut session).map_or_else(Error::Refused, Error::NotNow)),
        _ => Err(refused("it does not say that it accepts this machine")),
    }
}

/// Makes a connection in which both ends are authenticated.
fn handshaken(
    config: ClientConfig,
    socket: &mut (impl Read + Write),
    protocol: &[u8],
) -> Result<ClientConnection, Error> {
    let name = ServerName::try_from(NAME).map_err(local)?;
    let mut connection = ClientConnection::new(Arc::new(config), name).map_err(local)?;
    while connection.is_handshaking() {
        connection.complete_io(socket).map_err(Error::Refused)?;
    }
    known(protocol, connection.alpn_protocol(), connection.peer_certificates())?;
    Ok(connection)
}

fn why_not_now(from: &mut impl Read) -> io::Result<String> {
    let mut length = [0];
    from.read_exact(&mut length)?;
    let mut why = vec![0; usize::from(length[0])];
    from.read_exact(&mut why)?;
    Ok(String::from_utf8_lossy(&why).into_owned())
}

/// Returns bytes that only the two ends of a session can derive, for proofs within this session.
///
/// # Errors
/// The session is over.
pub fn binding<Side>(connection: &rustls::ConnectionCommon<Side>) -> io::Result<[u8; 32]> {
    connection.export_keying_material([0; 32], BINDING, None).map_err(io::Error::other)
}

fn refused(why: &'static str) -> Error {
    Error::Refused(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// Checks the protocol and the certificates once more. The handshake cannot end without them.
fn known(
    wanted: &[u8],
    protocol: Option<&[u8]>,
    certificates: Option<&[CertificateDer<'_>]>,
) -> Result<(), Error> {
    if protocol != Some(wanted) {
        return Err(refused("it speaks another protocol"));
    }
    if certificates.is_none_or(<[_]>::is_empty) {
        return Err(refused("it has not identified itself"));
    }
    Ok(())
}

fn certificate(key: &KeyPair, now: SystemTime, lifetime: Duration) -> Result<CertificateDer<'static>, Error> {
    let mut params = CertificateParams::new(vec![NAME.to_owned()]).map_err(local)?;
    params.not_before = (now - CLOCKS_DIFFER).into();
    params.not_after = (now + lifetime).into();
    Ok(params.self_signed(key).map_err(local)?.der().clone())
}

#[cfg(test)]
mod tests;
