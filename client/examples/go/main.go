// A backend service's calls: an answer as it comes, one that is stopped, and a refusal.
//
// The stubs come from the folder `proto` of the repository, with protoc-gen-go and protoc-gen-go-grpc:
//
//	protoc -Iproto --go_out=. --go-grpc_out=. proto/millrace/common/v1/*.proto proto/millrace/inference/v1/*.proto
//
// They are packages of the module `millrace`. Then: go mod init millrace && go mod tidy && go run . HOST:PORT KEY MODEL
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	commonv1 "millrace/common/v1"
	inferencev1 "millrace/inference/v1"
)

func ask(text string, model string, sampling *commonv1.SamplingOptions) *inferencev1.ChatRequest {
	message := &commonv1.Message{Role: commonv1.Role_ROLE_USER, Content: text}
	conversation := &commonv1.Conversation{Messages: []*commonv1.Message{message}}
	return &inferencev1.ChatRequest{Model: model, Conversation: conversation, Sampling: sampling}
}

// stream prints an answer as it comes; its last message has the usage.
func stream(ctx context.Context, client inferencev1.InferenceServiceClient, model string) error {
	sampling := &commonv1.SamplingOptions{Temperature: proto.Float32(0), MaxTokens: proto.Uint32(60)}
	answer, err := client.Chat(ctx, ask("What is the capital of Japan?", model, sampling))
	if err != nil {
		return err
	}
	for {
		part, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, choice := range part.Choices {
			fmt.Print(choice.Content)
		}
		if part.Usage != nil {
			fmt.Printf("\n%d tokens, request %s\n", part.Usage.CompletionTokens, part.RequestId)
		}
	}
}

// leave stops an answer after its first piece: cancelling the context ends it in the engine as well.
func leave(ctx context.Context, client inferencev1.InferenceServiceClient, model string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sampling := &commonv1.SamplingOptions{MaxTokens: proto.Uint32(500), IgnoreEos: proto.Bool(true)}
	story, err := client.Chat(ctx, ask("Tell me a long story.", model, sampling))
	if err != nil {
		return err
	}
	part, err := story.Recv()
	if err != nil {
		return err
	}
	fmt.Println("stopped after:", part.Choices[0].Content)
	return nil
}

// refuse shows what an error has in detail: the field at fault, the reason, and when to come back.
func refuse(ctx context.Context, client inferencev1.InferenceServiceClient, model string) error {
	sampling := &commonv1.SamplingOptions{Temperature: proto.Float32(-1)}
	answer, err := client.Chat(ctx, ask("Hello!", model, sampling))
	if err == nil {
		_, err = answer.Recv()
	}
	refused, _ := status.FromError(err)
	for _, detail := range refused.Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("refused: %s: %s\n", found.Reason, refused.Message())
		case *errdetails.BadRequest:
			fmt.Println("at", found.FieldViolations[0].Field)
		case *errdetails.RetryInfo:
			fmt.Println("retry after", found.RetryDelay.AsDuration())
		}
	}
	return nil
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: go run . HOST:PORT KEY MODEL")
	}
	address, key, model := os.Args[1], os.Args[2], os.Args[3]
	// Over TLS: grpc.WithTransportCredentials(credentials.NewClientTLSFromCert(nil, "")).
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := inferencev1.NewInferenceServiceClient(connection)
	// The deadline travels with the call.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	for _, show := range []func(context.Context, inferencev1.InferenceServiceClient, string) error{stream, leave, refuse} {
		if err := show(ctx, client, model); err != nil {
			log.Fatal(err)
		}
	}
}
