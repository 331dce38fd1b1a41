package vorrang_test

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"

	vorrang "github.com/vorrang/vorrang/clients/go"
	"github.com/vorrang/vorrang/clients/go/internal/testserver"
)

const (
	acmeToken   = "acme-token-0123456789"
	othersToken = "others-token-0123456789"
)

// tenants are two: acme, which may ask for level 0 at most, and others.
func tenants() []string {
	return []string{
		fmt.Sprintf(`VORRANG_TENANTS__ACME__TOKEN_HASHES=["sha256:%x"]`, sha256.Sum256([]byte(acmeToken))),
		`VORRANG_TENANTS__ACME__CERTIFICATE_SUBJECTS=["CN=acme"]`,
		"VORRANG_TENANTS__ACME__MOST_URGENT_LEVEL=0",
		"VORRANG_TENANTS__ACME__DEFAULT_LEVEL=5",
		fmt.Sprintf(`VORRANG_TENANTS__OTHERS__TOKEN_HASHES=["sha256:%x"]`, sha256.Sum256([]byte(othersToken))),
	}
}

// serveTLS is a server with tenants and TLS, and the folder of its certificates.
func serveTLS(t *testing.T, settings ...string) (*testserver.Server, string) {
	t.Helper()
	folder := testserver.Certificates(t)
	settings = append(settings, tenants()...)
	return serve(t, append(settings,
		"VORRANG_TLS__CERTIFICATE="+filepath.Join(folder, "server.pem"),
		"VORRANG_TLS__PRIVATE_KEY="+filepath.Join(folder, "server.key"))...), folder
}

// trusting is a TLS configuration that trusts an authority, and shows a certificate if it is given one's name.
func trusting(t *testing.T, folder, authority, name string) vorrang.DialOption {
	t.Helper()
	pem, err := os.ReadFile(filepath.Join(folder, authority))
	if err != nil {
		t.Fatal(err)
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		t.Fatalf("%s holds no certificate", authority)
	}
	if name != "" {
		own, err := tls.LoadX509KeyPair(filepath.Join(folder, name+".pem"), filepath.Join(folder, name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{own}
	}
	return vorrang.WithTLS(config)
}

// capped holds that the client is acme's, and so urgent alone as acme may be.
func capped(t *testing.T, client *vorrang.Client) {
	t.Helper()
	session := open(t, client)
	equal(t, "default level", session.Info().DefaultLevel, 5)
	stream := start(t, session, "urgent", vorrang.WithPriority(vorrang.Interactive),
		vorrang.WithMaxTokens(50), vorrang.WithManualCredit(2))
	first := accepted(t, stream)
	equal(t, "level", first.Level, 0)
	equal(t, "capped", first.Capped, true)
	equal(t, "requested", first.RequestedLevel, -10)
	text := readTokens(t, stream, 2)
	for _, change := range []struct {
		to, level int
		capped    bool
	}{{-50, 0, true}, {7, 7, false}} {
		changed, err := stream.Reprioritize(within(t), vorrang.Level(change.to))
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "changed", changed, vorrang.PriorityChanged{Level: change.level, Capped: change.capped})
	}
	if err := stream.Credit(within(t), 48); err != nil {
		t.Fatal(err)
	}
	equal(t, "text", text+result(t, stream).Text, scripted("urgent", 50))
	usual := accepted(t, start(t, session, "usual", vorrang.WithMaxTokens(2)))
	equal(t, "usual level", usual.Level, 5)
	equal(t, "usual capped", usual.Capped, false)
}

func TestATokenNamesATenantWhosePriorityIsCapped(t *testing.T) {
	t.Parallel() // it waits more than it computes
	server, folder := serveTLS(t)
	client := dial(t, server.Address, trusting(t, folder, "ca.pem", ""), vorrang.WithToken(acmeToken))
	capped(t, client)
	whole, err := client.Generate(within(t), greedy("hello"),
		vorrang.WithMaxTokens(5), vorrang.WithPriority(vorrang.Interactive))
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "text", whole.Text, scripted("hello", 5))
	equal(t, "capped", whole.Accepted.Capped, true)

	for what, options := range map[string][]vorrang.DialOption{
		"no token": nil, "a wrong token": {vorrang.WithToken("wrong-token-0123456789")},
	} {
		nobody := dial(t, server.Address, append(options, trusting(t, folder, "ca.pem", ""))...) // health is for all
		_, err := nobody.Generate(within(t), greedy("hello"))
		equal(t, what+": call", failure(t, err).Reason, vorrang.ReasonUnauthenticated)
		_, err = nobody.Session(within(t), vorrang.WithAutoResume(patience))
		equal(t, what+": session", failure(t, err).Reason, vorrang.ReasonUnauthenticated)
		equal(t, what+": code", failure(t, err).Code, codes.Unauthenticated)
	}
}

func TestAServerThatIsNotTrustedIsNotTalkedTo(t *testing.T) {
	t.Parallel() // it waits more than it computes
	server, folder := serveTLS(t)
	for what, option := range map[string]vorrang.DialOption{
		"another authority": trusting(t, folder, "stranger-ca.pem", ""), "plaintext": vorrang.WithPlaintext(),
	} {
		if _, err := vorrang.Dial(within(t), server.Address, option); failure(t, err).Code != codes.Unavailable {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestACertificateNamesATenant(t *testing.T) {
	t.Parallel() // it waits more than it computes
	folder := testserver.Certificates(t)
	server := serve(t, append(tenants(),
		"VORRANG_TLS__CERTIFICATE="+filepath.Join(folder, "server.pem"),
		"VORRANG_TLS__PRIVATE_KEY="+filepath.Join(folder, "server.key"),
		"VORRANG_TLS__CLIENT_CA="+filepath.Join(folder, "ca.pem"))...)
	capped(t, dial(t, server.Address, trusting(t, folder, "ca.pem", "acme")))
	for _, name := range []string{"", "stranger"} {
		if _, err := vorrang.Dial(within(t), server.Address, trusting(t, folder, "ca.pem", name)); err == nil ||
			failure(t, err).Code != codes.Unavailable {
			t.Errorf("with the certificate %q: %v", name, err)
		}
	}
}

func TestALostSessionIsResumedByItsTenantAlone(t *testing.T) {
	t.Parallel() // it waits more than it computes
	server, folder := serveTLS(t, "VORRANG_ENGINE__SCRIPTED_STEP_S=0.005")
	p := newProxy(t, server.Address)
	authority := trusting(t, folder, "ca.pem", "")
	session := open(t, dial(t, p.address, authority, vorrang.WithToken(acmeToken)), vorrang.WithAutoResume(patience))
	stream := start(t, session, "hello", vorrang.WithMaxTokens(200))
	text := readTokens(t, stream, 10)

	others := dial(t, server.Address, authority, vorrang.WithToken(othersToken))
	_, err := others.Session(within(t), vorrang.WithSessionToken(session.Info().Token))
	if !errors.Is(err, vorrang.ReasonResumeOutOfRange) {
		t.Errorf("another tenant takes the session: %v", err)
	}
	lose(t, p, session)
	equal(t, "text", text+result(t, stream).Text, scripted("hello", 200))
}
