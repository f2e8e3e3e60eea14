//! Access to the page: requests need the token, and must come from the page's own origin.

use std::fmt::Write;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use axum::http::{HeaderMap, StatusCode, Uri, header};

use crate::exit::{FAILED, Failure, USAGE};

/// The shortest token in a file.
const SHORTEST: usize = 16;

/// The secret that a browser or a scraper must present.
pub(super) struct Token(String);

impl Token {
    /// Draws a random token.
    pub(super) fn random() -> Result<Self, Failure> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|_cause| {
            Failure::new(FAILED, "the operating system provided no randomness")
        })?;
        let mut text = String::new();
        for byte in bytes {
            write!(text, "{byte:02x}").unwrap_or_default();
        }
        Ok(Self(text))
    }

    /// Reads a token from a file.
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        let text = fs::read_to_string(path).map_err(|cause| {
            Failure::new(FAILED, format!("cannot read token file {shown}: {cause}"))
        })?;
        let text = text.trim();
        let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        if text.len() < SHORTEST || !text.bytes().all(is_safe) {
            let message = format!(
                "token file {shown} must contain at least {SHORTEST} letters, digits or -._~"
            );
            return Err(Failure::new(USAGE, message));
        }
        Ok(Self(text.to_owned()))
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    /// Compares in a time that does not depend on where the texts differ.
    fn is(&self, other: &str) -> bool {
        let (ours, other) = (self.0.as_bytes(), other.as_bytes());
        let differences = ours.iter().zip(other).fold(0, |all, (one, two)| all | (one ^ two));
        ours.len() == other.len() && differences == 0
    }
}

/// Decides about every request.
pub(super) struct Access {
    token: Token,
    address: SocketAddr,
}

impl Access {
    pub(super) fn new(token: Token, address: SocketAddr) -> Self {
        Self { token, address }
    }

    /// The URL for a browser, without the token.
    pub(super) fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The URL for a browser, with the token.
    pub(super) fn url(&self) -> String {
        format!("{}/?token={}", self.origin(), self.token.expose())
    }

    /// The cookie that the page sets. Cookies are shared by all ports of a host, so its name
    /// contains the port.
    pub(super) fn cookie(&self) -> String {
        let (name, token) = (self.cookie_name(), self.token.expose());
        format!("{name}={token}; HttpOnly; SameSite=Strict; Path=/")
    }

    fn cookie_name(&self) -> String {
        format!("syncguard-ui-{}", self.address.port())
    }

    /// Admits a request that has the token and comes from the page itself, or from no page.
    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), StatusCode> {
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
        let host = text(header::HOST);
        // Another name for this machine's own address is how a foreign page gets around its origin.
        if self.address.ip().is_loopback() && !host.is_some_and(|host| self.is_own_name(host)) {
            return Err(StatusCode::FORBIDDEN);
        }
        if let Some(origin) = text(header::ORIGIN)
            && origin.strip_prefix("http://") != host
        {
            return Err(StatusCode::FORBIDDEN);
        }
        let bearer = text(header::AUTHORIZATION).and_then(|text| text.strip_prefix("Bearer "));
        let name = self.cookie_name();
        let cookie = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let cookie = cookie.flat_map(|value| value.split("; ")).find_map(|pair| {
            pair.split_once('=').filter(|(key, _)| *key == name).map(|(_, value)| value)
        });
        let query = uri.query().filter(|_| uri.path() == "/").unwrap_or_default();
        let parameter = query.split('&').find_map(|pair| pair.strip_prefix("token="));
        let mut presented = [bearer, cookie, parameter].into_iter().flatten();
        if presented.any(|text| self.token.is(text)) {
            Ok(())
        } else {
            Err(StatusCode::UNAUTHORIZED)
        }
    }

    fn is_own_name(&self, host: &str) -> bool {
        let port = self.address.port();
        host == self.address.to_string() || host == format!("localhost:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        Access::new(Token("0123456789abcdef".to_owned()), ([127, 0, 0, 1], 8080).into())
    }

    fn check(path: &str, headers: &[(header::HeaderName, &str)]) -> Result<(), StatusCode> {
        let mut map = HeaderMap::new();
        map.insert(header::HOST, "127.0.0.1:8080".parse().expect("valid"));
        for (name, value) in headers {
            map.insert(name, value.parse().expect("valid"));
        }
        access().check(&path.parse().expect("valid"), &map)
    }

    #[test]
    fn the_token_is_accepted_as_parameter_cookie_and_header() {
        assert_eq!(check("/?token=0123456789abcdef", &[]), Ok(()));
        let cookie = "other=1; syncguard-ui-8080=0123456789abcdef";
        assert_eq!(check("/events", &[(header::COOKIE, cookie)]), Ok(()));
        let bearer = "Bearer 0123456789abcdef";
        assert_eq!(check("/metrics", &[(header::AUTHORIZATION, bearer)]), Ok(()));
    }

    #[test]
    fn everything_else_is_unauthorized() {
        for (path, cookie) in [
            ("/", ""),
            ("/?token=", ""),
            ("/?token=0123456789abcdeX", ""),
            ("/?token=0123456789abcdef0", ""),
            // A token belongs into the address of the page only, not into those of its parts.
            ("/events?token=0123456789abcdef", ""),
            ("/events", "syncguard-ui-8081=0123456789abcdef"),
            ("/events", "syncguard-ui-8080=0123456789abcde"),
        ] {
            let found = check(path, &[(header::COOKIE, cookie)]);
            assert_eq!(found, Err(StatusCode::UNAUTHORIZED), "{path} {cookie}");
        }
    }

    #[test]
    fn other_origins_and_names_are_refused_even_with_the_token() {
        let path = "/?token=0123456789abcdef";
        for (name, value) in [
            (header::ORIGIN, "http://evil.example"),
            (header::ORIGIN, "https://127.0.0.1:8080"),
            (header::ORIGIN, "http://127.0.0.1:8081"),
            (header::ORIGIN, "null"),
            (header::HOST, "evil.example:8080"),
        ] {
            let found = check(path, &[(name.clone(), value)]);
            assert_eq!(found, Err(StatusCode::FORBIDDEN), "{name} {value}");
        }
        assert_eq!(check(path, &[(header::ORIGIN, "http://127.0.0.1:8080")]), Ok(()));
        assert_eq!(check(path, &[(header::HOST, "localhost:8080")]), Ok(()));
    }
}
